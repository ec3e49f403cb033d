//! API keys: only their digests are known, and how long a comparison takes says nothing.

use http::HeaderMap;
use http::header::AUTHORIZATION;
use kvik_runtime::trust::{Scope, Trust};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

use crate::config::ApiKeyConfig;

/// The accepted keys; without any, every request is accepted.
#[derive(Debug, Default)]
pub(crate) struct ApiKeys {
    is_required: bool,
    digests: Vec<[u8; 32]>,
}

impl ApiKeys {
    /// The keys of a validated configuration; a digest that is none is left out, so that it can
    /// never match.
    pub(crate) fn new(keys: &[ApiKeyConfig]) -> Self {
        let digests = keys.iter().filter_map(|key| parse_digest(key.sha256.expose())).collect();
        Self { is_required: !keys.is_empty(), digests }
    }

    /// Whether a call to the index is served: with an accepted key or a token of `trust`; without any keys, as a call
    /// of a member.
    pub(crate) fn admits(&self, trust: &Trust, headers: &HeaderMap) -> bool {
        trust.is_shown_token(headers)
            || if self.is_required {
                self.accepts(headers)
            } else {
                trust.check(headers, None, Scope::Cluster).is_ok()
            }
    }

    /// Whether the request shows an accepted key.
    pub(crate) fn accepts(&self, headers: &HeaderMap) -> bool {
        if !self.is_required {
            return true;
        }
        let Some(key) = headers.get(AUTHORIZATION).and_then(|value| bearer(value.as_bytes())) else {
            return false;
        };
        let digest: [u8; 32] = Sha256::digest(key).into();
        let mut is_known = Choice::from(0);
        for known in &self.digests {
            is_known |= known.ct_eq(&digest);
        }
        is_known.into()
    }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

fn parse_digest(text: &str) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    let bytes = text.as_bytes();
    if bytes.len() != 64 {
        return None;
    }
    for (byte, pair) in digest.iter_mut().zip(bytes.chunks_exact(2)) {
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        *byte = (high * 16 + low) as u8;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use kvik_runtime::http::TlsServerConfig;
    use kvik_runtime::trust::{TOKEN_HEADER, TrustSettings};

    use super::*;

    /// `printf %s secret | sha256sum`
    const SECRET: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    fn keys() -> ApiKeys {
        ApiKeys::new(&[
            ApiKeyConfig { name: "other".to_owned(), sha256: "0".repeat(64).into() },
            ApiKeyConfig { name: "me".to_owned(), sha256: SECRET.to_uppercase().into() },
        ])
    }

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn a_key_is_accepted_by_its_digest() {
        assert!(keys().accepts(&headers("Bearer secret")));
        assert!(keys().accepts(&headers("bearer  secret ")));
    }

    #[test]
    fn everything_else_is_not() {
        for value in ["Bearer secret2", "Bearer ", "secret", "Basic secret", ""] {
            assert!(!keys().accepts(&headers(value)), "{value}");
        }
        assert!(!keys().accepts(&HeaderMap::new()));
    }

    #[test]
    fn a_call_to_the_index_needs_a_key_or_a_token_where_there_is_one() {
        const TOKEN: &str = "cluster-token-0123456789";
        let token = TOKEN.into();
        let settings = TrustSettings { cluster_token: Some(&token), ..TrustSettings::default() };
        let trust = settings.read(&TlsServerConfig::default()).unwrap();
        let shown = HeaderMap::from_iter([(TOKEN_HEADER, TOKEN.parse().unwrap())]);
        let (key, nothing) = (headers("Bearer secret"), HeaderMap::new());
        for (keys, trust, admitted, refused) in [
            (keys(), &trust, vec![&shown, &key], vec![&nothing]),
            (keys(), &Trust::default(), vec![&key], vec![&shown, &nothing]),
            (ApiKeys::default(), &trust, vec![&shown], vec![&key, &nothing]),
            (ApiKeys::default(), &Trust::default(), vec![&shown, &key, &nothing], vec![]),
        ] {
            assert!(admitted.iter().all(|headers| keys.admits(trust, headers)));
            assert!(!refused.iter().any(|headers| keys.admits(trust, headers)));
        }
    }

    #[test]
    fn without_keys_every_request_is_accepted() {
        assert!(ApiKeys::default().accepts(&HeaderMap::new()));
    }
}
