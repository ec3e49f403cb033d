//! The memory that engines on this machine share: the ledgers of the worker's folder, as `kvctl` sees them.

use axum::extract::{Request, State};
use http::StatusCode;
use kvik_memory::MemoryError;
use kvik_memory::ledger::{DeviceSnapshot, GroupSnapshot, Ledger, Policy, list_devices};
use kvik_proto::memory::{
    DeviceMemory, GroupMemory, GroupPolicy, MemberMemory, MemoryReport, PolicyRequest, PolicyResponse,
    TrimRequest, TrimResponse, UnreadableLedger,
};

use super::{Answer, Shared, json, read_json};
use crate::error::Refusal;
use crate::state::WorkerState;

/// `GET /memory`.
pub(super) async fn report(State(state): Shared) -> Answer {
    let dir = state.config.memory.dir.clone();
    let report = blocking(move || {
        let mut report = MemoryReport::default();
        for device in list_devices(&dir).map_err(|error| refusal(&error))? {
            match Ledger::open_existing(&dir, &device)
                .and_then(|ledger| ledger.map(|ledger| ledger.snapshot()).transpose())
            {
                Ok(Some(snapshot)) => report.devices.push(device_memory(&snapshot)),
                // It went just now.
                Ok(None) => {}
                // One that cannot be read does not hide the others.
                Err(error) => report.unreadable.push(UnreadableLedger { device, reason: error.to_string() }),
            }
        }
        Ok(report)
    });
    Ok(json(StatusCode::OK, &report.await?))
}

/// `POST /memory/policy`.
pub(super) async fn set_policy(State(state): Shared, request: Request) -> Answer {
    let request: PolicyRequest = read_json(&state, request).await?;
    let ledger = find(&state, &request.device)?;
    let response = blocking(move || {
        // A misspelled name must not become a group.
        group(&ledger, &request.ipc)?;
        let GroupPolicy { min_bytes, max_bytes, weight, priority } = request.policy;
        let policy = Policy { min_bytes, max_bytes, weight, priority };
        ledger.set_policy(&request.ipc, &policy).map_err(|error| refusal(&error))?;
        tracing::info!(device = %request.device, ipc = %request.ipc, ?policy, "the policy of a group was changed");
        let GroupSnapshot { policy, over_limit_bytes, .. } = group(&ledger, &request.ipc)?;
        Ok(PolicyResponse { policy: group_policy(&policy), over_limit_bytes })
    });
    Ok(json(StatusCode::OK, &response.await?))
}

/// `POST /memory/trim`.
pub(super) async fn trim(State(state): Shared, request: Request) -> Answer {
    let request: TrimRequest = read_json(&state, request).await?;
    let ledger = find(&state, &request.device)?;
    let response = blocking(move || {
        group(&ledger, &request.ipc)?;
        let engines = ledger.request_trim(&request.ipc).map_err(|error| refusal(&error))?;
        Ok(TrimResponse { engines })
    });
    Ok(json(StatusCode::OK, &response.await?))
}

/// The ledger of a device.
fn find(state: &WorkerState, device: &str) -> Result<Ledger, Refusal> {
    let dir = &state.config.memory.dir;
    let devices = list_devices(dir).map_err(|error| refusal(&error))?;
    // A name that is none of these never becomes a part of a path.
    let ledger = match devices.iter().find(|known| *known == device) {
        Some(device) => Ledger::open_existing(dir, device).map_err(|error| refusal(&error))?,
        None => None,
    };
    ledger.ok_or_else(|| {
        let there = if devices.is_empty() { "none".to_owned() } else { devices.join(", ") };
        Refusal::not_found(
            format!("no ledger of the device `{device}` here; there are: {there}"),
            Some("device"),
        )
    })
}

/// The group of a name.
fn group(ledger: &Ledger, ipc: &str) -> Result<GroupSnapshot, Refusal> {
    let groups = ledger.snapshot().map_err(|error| refusal(&error))?.groups;
    let names: Vec<String> = groups.iter().map(|group| group.ipc_name.clone()).collect();
    groups.into_iter().find(|group| group.ipc_name == ipc).ok_or_else(|| {
        let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        Refusal::not_found(
            format!("no group `{ipc}` on {}; there are: {there}", ledger.device()),
            Some("ipc"),
        )
    })
}

/// A ledger's lock may be held by another process for a while.
async fn blocking<T: Send + 'static>(
    ask: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(ask).await.map_err(|_| Refusal::failed("the ledger could not be read"))?
}

fn refusal(error: &MemoryError) -> Refusal {
    match error {
        MemoryError::Invalid { field, .. } => Refusal::invalid(error.to_string(), Some(field)),
        _ => Refusal::failed(error.to_string()),
    }
}

fn device_memory(snapshot: &DeviceSnapshot) -> DeviceMemory {
    DeviceMemory {
        device: snapshot.device.clone(),
        budget_bytes: snapshot.budget_bytes,
        granted_bytes: snapshot.held_bytes,
        free_bytes: snapshot.budget_bytes.saturating_sub(snapshot.held_bytes),
        groups: snapshot.groups.iter().map(|group| group_memory(snapshot, group)).collect(),
    }
}

fn group_memory(device: &DeviceSnapshot, group: &GroupSnapshot) -> GroupMemory {
    let members = device.members.iter().filter(|member| member.ipc_name == group.ipc_name);
    let limit_bytes = match group.policy.max_bytes {
        // No engine has set a budget yet.
        Some(max_bytes) if device.budget_bytes == 0 => max_bytes,
        max_bytes => max_bytes.unwrap_or(u64::MAX).min(device.budget_bytes),
    };
    GroupMemory {
        ipc: group.ipc_name.clone(),
        limit_bytes,
        held_bytes: group.held_bytes,
        used_bytes: group.used_bytes,
        parked_bytes: group.parked_bytes,
        wanted_bytes: group.wanted_bytes,
        entitled_bytes: group.entitled_bytes,
        over_limit_bytes: group.over_limit_bytes,
        policy: group_policy(&group.policy),
        members: members
            .map(|member| MemberMemory {
                label: member.label.clone(),
                pid: member.pid,
                is_live: member.is_live,
                held_bytes: member.held_bytes,
                used_bytes: member.used_bytes,
            })
            .collect(),
    }
}

fn group_policy(policy: &Policy) -> GroupPolicy {
    let Policy { min_bytes, max_bytes, weight, priority } = *policy;
    GroupPolicy { min_bytes, max_bytes, weight, priority }
}
