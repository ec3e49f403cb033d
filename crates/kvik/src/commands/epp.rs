//! `kvik epp`: the endpoint picker of data planes.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use kvik_epp::{Epp, EppConfig};
use kvik_gateway::GatewayConfig;
use serde_json::{Value, json};

use super::service::{self, Flags};
use crate::cli::services::EppArguments;

/// Runs a picker until its exchanges have ended.
pub(crate) fn run(arguments: &EppArguments) -> anyhow::Result<()> {
    let common = &arguments.service;
    let pool = arguments.pool.as_ref().map(|name| json!({"name": name}));
    let flags = Flags::default().with("listen", arguments.listen.clone()).with("pool", pool);
    let config = service::load::<EppConfig>("epp", common.config.as_deref(), flags, &common.set)?.value;
    let backends: Vec<Value> = arguments.backend.iter().map(|url| json!({"url": url})).collect();
    let load = {
        let (listen, coordinators) = (arguments.http_listen.clone(), arguments.coordinator.clone());
        let file = common.config.clone();
        move || {
            let flags = Flags::default()
                .with("listen", listen.clone())
                .with("backends", (!backends.is_empty()).then(|| backends.clone()))
                .with_list("coordinators", &coordinators);
            service::load::<GatewayConfig>("gateway", file.as_deref(), flags, &[])
                .map(|effective| effective.value)
        }
    };
    let gateway = load()?;
    let file = common.config.clone();
    service::run(common, "info", async |shutdown| {
        shutdown.listen_for_signals(Duration::from_secs(gateway.drain_grace_s));
        let epp = Epp::start(config, gateway, &shutdown).await.context("start the picker")?;
        let bundled = kvik_model::Model::bundled()?;
        let chooser = epp.gateway().gateway();
        chooser.provide_tokenizer(bundled.name(), Arc::clone(bundled.tokenizer()));
        chooser.reload_on_change(file, load);
        let (address, http_address) = (epp.address(), epp.gateway().address());
        tracing::info!(%address, %http_address, "epp is ready");
        shutdown.draining().await;
        epp.finished().await;
        Ok(())
    })
}
