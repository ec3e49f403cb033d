//! `kvctl stores`: the store daemons that a coordinator lists.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use anstyle::Style;
use anyhow::Context as _;
use clap::Args;
use kvik_proto::client::{CoordinatorClient, TlsClientConfig, http_client};
use kvik_proto::stores::{StoreInfo, StoreList};
use kvik_runtime::trust::client_header;
use serde::Serialize;

use super::{Answer, size};

const BOLD: Style = Style::new().bold();

/// Prints the store daemons of a cluster.
#[derive(Debug, Args)]
pub(crate) struct StoresArguments {
    /// Base address of the coordinator
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8081")]
    pub(crate) coordinator: String,

    /// PEM file of the authorities that sign the coordinator's certificate [default: none, only http:// works]
    #[arg(long, value_name = "FILE")]
    pub(crate) authorities: Option<PathBuf>,

    /// File with the cluster token [default: `KVIK_ADMIN_TOKEN`, then `KVIK_CLUSTER_TOKEN`, if set]
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
}

/// The list as it came, for machines, and as a table for people.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct StoresAnswer(StoreList);

/// Asks the coordinator for its list.
///
/// # Errors
/// If it cannot be asked, or refuses.
pub(crate) fn stores(arguments: &StoresArguments) -> anyhow::Result<StoresAnswer> {
    let authorities_pem = match &arguments.authorities {
        Some(path) => fs::read(path).with_context(|| format!("read {}", path.display()))?,
        None => Vec::new(),
    };
    let http = http_client(&TlsClientConfig { authorities_pem, identity_pem: None })?;
    let token = client_header(arguments.token_file.as_deref())?;
    let client = CoordinatorClient::new(http, &arguments.coordinator).with_header(token);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the client")?;
    Ok(StoresAnswer(runtime.block_on(client.stores()).context("ask the coordinator for its stores")?))
}

impl Answer for StoresAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let stores = &self.0.stores;
        if stores.is_empty() {
            return writeln!(output, "no store is listed");
        }
        let width_of = |text: fn(&StoreInfo) -> &str, title: &str| {
            stores.iter().map(|store| text(store).len()).chain([title.len()]).max().unwrap_or(0)
        };
        let id_width = width_of(|store| &store.id, "Store");
        let address_width = width_of(|store| &store.address, "Address");
        let (store, place, memory) = ("Store", "Address", "Memory");
        writeln!(output, "{BOLD}{store:<id_width$}  {place:<address_width$}  {memory:>12}  Workers{BOLD:#}")?;
        for StoreInfo { id, address, memory_bytes, .. } in stores {
            let memory = size::long(*memory_bytes);
            let attached = self.0.workers.iter().filter(|(_, store)| *store == address);
            let workers: Vec<&str> = attached.map(|(worker, _)| worker.as_str()).collect();
            let workers = if workers.is_empty() { "-".to_owned() } else { workers.join(", ") };
            writeln!(output, "{id:<id_width$}  {address:<address_width$}  {memory:>12}  {workers}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(stores: Vec<StoreInfo>, workers: &[(&str, &str)]) -> String {
        let mut output = Vec::new();
        let workers =
            workers.iter().map(|(worker, store)| ((*worker).to_owned(), (*store).to_owned())).collect();
        let list = StoreList { term: 1, version: 2, stores, workers };
        StoresAnswer(list).write_text(&mut output).unwrap();
        anstream::adapter::strip_bytes(&output).into_vec().try_into().unwrap()
    }

    #[test]
    fn stores_are_a_table() {
        assert_eq!(text(Vec::new(), &[]), "no store is listed\n");
        let store = |id: &str, address: &str, memory_bytes| StoreInfo {
            id: id.to_owned(),
            epoch: 1,
            address: address.to_owned(),
            memory_bytes,
        };
        let stores = vec![
            store("fd00::1:9106", "[fd00::1]:9106", 20 << 30),
            store("node-2:9106", "node-2:9106", 1 << 20),
        ];
        let table = text(stores, &[("w1", "node-2:9106"), ("w2", "node-2:9106"), ("w3", "node-9:9106")]);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "Store         Address               Memory  Workers");
        assert!(
            lines[1].starts_with("fd00::1:9106  [fd00::1]:9106  ") && lines[1].ends_with("  -"),
            "{table}"
        );
        assert!(
            lines[2].starts_with("node-2:9106   node-2:9106     ") && lines[2].ends_with("  w1, w2"),
            "{table}"
        );
    }
}
