//! `kvik config`: every field of every role, its value and where that comes from.

use std::collections::BTreeMap;

use kvik_coordinator::CoordinatorConfig;
use kvik_epp::EppConfig;
use kvik_gateway::GatewayConfig;
use kvik_node::DaemonConfig;
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
        ("epp", fields::<EppConfig>("epp", arguments)?),
        ("coordinator", fields::<CoordinatorConfig>("coordinator", arguments)?),
        ("worker", fields::<WorkerConfig>("worker", arguments)?),
        ("store", fields::<DaemonConfig>("store", arguments)?),
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
            (field.clone(), json!({"value": value, "origin": origin.to_string()}))
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
