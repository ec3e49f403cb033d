//! Workers by role on the command line.

use kvik_proto::coordinator::WorkerRole;

/// Most workers of one process.
const MAX_WORKERS: usize = 64;

/// The role of each worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerRoles(pub(crate) Vec<WorkerRole>);

/// Reads numbers of workers by role, such as `prefill=1,decode=2`.
///
/// # Errors
/// What is wrong, and what is allowed.
pub(crate) fn parse_roles(text: &str) -> Result<WorkerRoles, String> {
    let mut roles = Vec::new();
    for item in text.split(',') {
        let (name, number) = item.split_once('=').unwrap_or((item, "1"));
        let all = [WorkerRole::Prefill, WorkerRole::Decode, WorkerRole::Both];
        let role = all.into_iter().find(|role| role.as_str() == name);
        let role = role.ok_or_else(|| format!("the role is `{name}`; allowed: prefill, decode, both"))?;
        let n_workers: usize = number.trim().parse().unwrap_or(0);
        if n_workers == 0 || MAX_WORKERS - roles.len() < n_workers {
            let allowed = format!("1 or more, {MAX_WORKERS} in all");
            return Err(format!("the number of workers of `{name}` is `{number}`; allowed: {allowed}"));
        }
        roles.extend(std::iter::repeat_n(role, n_workers));
    }
    Ok(WorkerRoles(roles))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_read_with_their_numbers() {
        let roles = |text| parse_roles(text).map(|roles| roles.0);
        let (prefill, decode) = (WorkerRole::Prefill, WorkerRole::Decode);
        assert_eq!(roles("prefill=1,decode=2"), Ok(vec![prefill, decode, decode]));
        assert_eq!(
            roles("prefill, decode"),
            Err("the role is ` decode`; allowed: prefill, decode, both".to_owned())
        );
        assert_eq!(roles("both").map(|roles| roles.len()), Ok(1));
        for (text, words) in [
            ("", "the role is ``"),
            ("prefil=1", "the role is `prefil`"),
            ("prefill=0", "`prefill` is `0`; allowed: 1 or more"),
            ("prefill=x", "`prefill` is `x`"),
            ("prefill=60,decode=5", "`decode` is `5`; allowed: 1 or more, 64 in all"),
            ("prefill=18446744073709551615", "64 in all"),
        ] {
            let error = roles(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
