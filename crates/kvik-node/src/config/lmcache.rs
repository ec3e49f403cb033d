//! Names of LMCache for what lies outside of a store: its controller and its reads between nodes.
//!
//! What kvik does in another place is refused with that place; what means nothing here is refused too, unless it says
//! that it is off.

use super::StoreConfig;
use super::field::{over, refuse};
use crate::error::Result;

impl StoreConfig {
    /// Refuses LMCache's names whose value has no meaning in a store.
    ///
    /// # Errors
    /// [`NodeError::Invalid`](crate::NodeError::Invalid) for the first of them, with what to use instead.
    pub(super) fn check_lmcache(&self) -> Result<()> {
        const COORDINATORS: &str =
            "not set: `coordinators` of a worker has the addresses of what governs it, over HTTP";
        const RANKS: &str =
            "not set: a worker has one name, `id` or `lmcache_instance_id`, and one port, `listen`";
        const PEERS: &str = "not set, or `enable_p2p: false`: other nodes are read by a store daemon, with `peer.listen` and \
            `peer.nodes`, to which a worker attaches with `store.daemon`";
        for (field, value) in [
            ("store.controller_pull_url", &self.controller_pull_url),
            ("store.controller_reply_url", &self.controller_reply_url),
        ] {
            if let Some(url) = value {
                return refuse(field, &url.to_string(), COORDINATORS);
            }
        }
        if let Some(ids) = &self.lmcache_worker_ids {
            return refuse("store.lmcache_worker_ids", &format!("{ids:?}"), RANKS);
        }
        if let Some(ports) = &self.lmcache_worker_ports {
            return refuse("store.lmcache_worker_ports", &format!("{ports:?}"), RANKS);
        }
        match (self.enable_p2p, &self.p2p_host, &self.p2p_init_ports) {
            (Some(true), ..) => return refuse("store.enable_p2p", "true", PEERS),
            (None, Some(host), _) => return refuse("store.p2p_host", host, PEERS),
            (None, _, Some(ports)) => return refuse("store.p2p_init_ports", &format!("{ports:?}"), PEERS),
            // What is off needs no address.
            (Some(false), ..) | (None, None, None) => {}
        }
        Ok(())
    }

    /// Whether tails are stored, under either name.
    pub(super) fn stores_tails(&self) -> Result<bool> {
        over("store.save_unfull_chunk", self.tails, &false, self.save_unfull_chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What LMCache's documentation shows for an engine with memory, a disk, a Redis server and a controller.
    const CONTROLLER_YAML: &str = r#"{
        "chunk_size": 256, "local_cpu": true, "max_local_cpu_size": 5,
        "local_disk": "file:///local/disk_test/", "max_local_disk_size": 5.0,
        "remote_url": "redis://localhost:6379", "cache_policy": "LRU", "use_layerwise": false,
        "save_unfull_chunk": true, "enable_p2p": false,
        "enable_controller": true, "lmcache_instance_id": "lmcache_default_instance"
    }"#;

    fn message(json: &str) -> String {
        serde_json::from_str::<StoreConfig>(json).unwrap().resolve().unwrap_err().to_string()
    }

    #[test]
    fn a_file_of_lmcache_makes_a_plan() {
        let config = serde_json::from_str::<StoreConfig>(CONTROLLER_YAML).unwrap();
        let plan = config.resolve().unwrap().unwrap();
        assert_eq!((plan.ram_bytes, plan.chunk_tokens, plan.stores_tails), (5_000_000_000, 256, true));
        let names: Vec<&str> = plan.tiers.iter().map(|tier| tier.name.as_str()).collect();
        assert_eq!(names, ["nvme", "peer", "redis"]);
    }

    #[test]
    fn what_means_nothing_here_is_refused_with_what_to_use_instead() {
        for (json, field, instead) in [
            (r#"{"controller_pull_url": "localhost:8300"}"#, "store.controller_pull_url", "`coordinators`"),
            (r#"{"controller_reply_url": "localhost:8400"}"#, "store.controller_reply_url", "`coordinators`"),
            (r#"{"lmcache_worker_ids": [0, 1]}"#, "store.lmcache_worker_ids", "`lmcache_instance_id`"),
            (r#"{"lmcache_worker_ports": [8001]}"#, "store.lmcache_worker_ports", "`listen`"),
            (r#"{"enable_p2p": true, "p2p_host": "a"}"#, "store.enable_p2p", "`peer.nodes`"),
            (r#"{"p2p_host": "localhost"}"#, "store.p2p_host", "`peer.listen`"),
            (r#"{"p2p_init_ports": [8200]}"#, "store.p2p_init_ports", "`store.daemon`"),
            (
                r#"{"tails": true, "save_unfull_chunk": false}"#,
                "store.save_unfull_chunk",
                "one of the two names",
            ),
            (
                r#"{"local_disk": "file:///a/,file:///b/", "max_local_disk_size": 5}"#,
                "store.local_disk",
                "`store.tiers`",
            ),
        ] {
            let text = message(json);
            assert!(text.contains(&format!("`{field}`")) && text.contains(instead), "{json}: {text}");
        }
        assert!(
            serde_json::from_str::<StoreConfig>(r#"{"enable_p2p": false, "p2p_host": "a"}"#)
                .unwrap()
                .resolve()
                .is_ok()
        );
    }
}
