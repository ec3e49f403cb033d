//! `kvik config`: every field of every role, its value and where that comes from.

use std::collections::BTreeMap;

use kvik_coordinator::CoordinatorConfig;
use kvik_gateway::GatewayConfig;
use kvik_runtime::config::{Effective, Origin};
use kvik_worker::WorkerConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::print_json;
use super::service::{self, Flags};
use crate::cli::ConfigArguments;
use kvik_runtime::terminal::{Align, Column, DIMMED, TITLE, Table};

type Fields = BTreeMap<String, (Value, Origin)>;

/// Prints the effective configuration.
pub(crate) fn run(arguments: &ConfigArguments) -> anyhow::Result<()> {
    let roles = [
        ("gateway", fields::<GatewayConfig>("gateway", arguments)?),
        ("coordinator", fields::<CoordinatorConfig>("coordinator", arguments)?),
        ("worker", fields::<WorkerConfig>("worker", arguments)?),
    ];
    if arguments.json {
        let object: serde_json::Map<String, Value> =
            roles.iter().map(|(role, fields)| to_json(role, fields)).collect();
        return print_json(&object);
    }
    let mut stdout = anstream::stdout().lock();
    for (idx, (role, fields)) in roles.iter().enumerate() {
        use std::io::Write;
        if 0 < idx {
            writeln!(stdout)?;
        }
        writeln!(stdout, "{TITLE}{role}{TITLE:#}")?;
        let mut table = Table::new(vec![
            Column::new("field", Align::Left),
            Column::new("value", Align::Left),
            Column::new("from", Align::Left).with_style(DIMMED),
        ]);
        for (field, (value, origin)) in fields {
            table.push([field.clone(), shown(value), origin.to_string()]);
        }
        table.write(&mut stdout)?;
    }
    Ok(())
}

fn fields<C: Serialize + DeserializeOwned + Default>(
    role: &str,
    arguments: &ConfigArguments,
) -> anyhow::Result<Fields> {
    let effective: Effective<C> = service::load(role, arguments.config.as_deref(), Flags::default(), &[])?;
    Ok(effective.fields)
}

fn to_json(role: &str, fields: &Fields) -> (String, Value) {
    let fields: serde_json::Map<String, Value> = fields
        .iter()
        .map(|(field, (value, origin))| {
            (field.clone(), json!({"value": hidden(field, value), "origin": origin.to_string()}))
        })
        .collect();
    (role.to_owned(), Value::Object(fields))
}

/// A value for people: strings bare, absent as `none`.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Hashes of keys are no secret, but nobody needs to read them off a screen; passwords and keys of stores are.
fn hidden(field: &str, value: &Value) -> Value {
    match (field, value) {
        ("api_keys", Value::Array(keys)) => json!(format!("{} keys", keys.len())),
        ("store.remote_options", Value::Object(options)) => {
            Value::Object(options.keys().map(|name| (name.clone(), json!("..."))).collect())
        }
        ("store.remote" | "store.remote_url", Value::String(url)) => json!(without_password(url)),
        (_, other) => other.clone(),
    }
}

/// The address with `...` in place of a password.
fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let authority_end = rest.find('/').unwrap_or(rest.len());
    let Some(user_end) = rest[..authority_end].rfind('@') else { return url.to_owned() };
    let user = rest[..user_end].split(':').next().unwrap_or_default();
    format!("{scheme}://{user}:...{}", &rest[user_end..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_and_keys_of_stores_are_not_shown() {
        let url = json!("rediss://user:se@cret@host:6379/2");
        assert_eq!(hidden("store.remote", &url), json!("rediss://user:...@host:6379/2"));
        assert_eq!(hidden("store.remote_url", &json!("redis://host/0")), json!("redis://host/0"));
        let options = json!({"secret_access_key": "x", "region": "eu"});
        assert_eq!(
            hidden("store.remote_options", &options),
            json!({"secret_access_key": "...", "region": "..."})
        );
    }
}
