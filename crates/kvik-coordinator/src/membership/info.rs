//! What a membership has to know of its members.

use std::fmt::Debug;

use kvik_proto::coordinator::WorkerInfo;
use kvik_proto::stores::StoreInfo;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A member as it describes itself.
pub(crate) trait MemberInfo:
    Clone + Debug + PartialEq + Serialize + DeserializeOwned + Send + Sync + 'static
{
    /// Where members of the kind are written down; no other kind has it.
    const FOLDER: &'static str;

    /// Its name, unique among the live ones.
    fn id(&self) -> &str;

    /// Its life; a later one replaces an earlier one.
    fn epoch(&self) -> u64;

    /// Where it is reached.
    fn address(&self) -> &str;
}

impl MemberInfo for WorkerInfo {
    const FOLDER: &'static str = "workers";

    fn id(&self) -> &str {
        &self.id
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn address(&self) -> &str {
        &self.address
    }
}

impl MemberInfo for StoreInfo {
    const FOLDER: &'static str = "stores";

    fn id(&self) -> &str {
        &self.id
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn address(&self) -> &str {
        &self.address
    }
}
