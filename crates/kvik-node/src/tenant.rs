//! Tenants of a daemon: whose chunks a client sees.

use std::fmt;
use std::path::Path;

use kvik_runtime::secret::Secret;
use kvik_store::Store;
use subtle::ConstantTimeEq;

use crate::error::{NodeError, Result};

/// The fewest bytes of a token: one that cannot be guessed.
const MIN_TOKEN_BYTES: usize = 16;

/// The most bytes of a token: those of a text in a frame.
const MAX_TOKEN_BYTES: usize = 4096;

/// What a client proves its tenant with. It is never printed.
#[derive(Clone)]
pub struct ClientToken(String);

/// A part of a daemon that shares nothing with the others: a name in the namespace of all its chunks, and a store of its
/// own with its own arena, so that a client can neither read nor damage what another tenant has.
#[derive(Debug, Clone)]
pub struct Tenant {
    /// Its name; empty for the tenant of those without a name.
    pub name: String,
    /// What clients prove that they belong to it with; without one every client that may connect does.
    pub token: Option<ClientToken>,
    /// Its chunks.
    pub store: Store,
}

// === impl ClientToken ===

impl ClientToken {
    /// A token of 16 to 4096 bytes.
    ///
    /// # Errors
    /// If it is shorter or longer.
    pub fn try_new(token: impl Into<String>) -> Result<Self> {
        let token = token.into();
        if !(MIN_TOKEN_BYTES..=MAX_TOKEN_BYTES).contains(&token.len()) {
            let allowed = format!("{MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes");
            return Err(NodeError::invalid("token", &format!("{} bytes", token.len()), allowed));
        }
        Ok(Self(token))
    }

    /// Reads the token that is in a file.
    pub(crate) fn read(file: &Path) -> Result<Self> {
        let secret = Secret::read(file)?;
        Self::try_new(secret.expose())
    }

    /// Its text, for the frame.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }

    /// Compares in a time that does not tell where the two differ.
    fn is(&self, text: &str) -> bool {
        self.0.as_bytes().ct_eq(text.as_bytes()).into()
    }
}

impl fmt::Debug for ClientToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ClientToken")
    }
}

// === impl Tenant ===

impl Tenant {
    /// The tenant of a daemon that has only one: every client that may connect belongs to it.
    pub fn only(store: Store) -> Self {
        Self { name: String::new(), token: None, store }
    }

    /// Whether clients with this token, which is empty where they have none, belong to it.
    pub(crate) fn has_token(&self, token: &str) -> bool {
        match &self.token {
            Some(own) => own.is(token),
            None => token.is_empty(),
        }
    }

    /// The tenant of a client with this token, which is empty where it has none.
    pub(crate) fn find<'a>(tenants: &'a [Self], token: &str) -> Option<&'a Self> {
        // All are compared, so that the time does not tell which tenants there are.
        tenants.iter().fold(None, |found, tenant| if tenant.has_token(token) { Some(tenant) } else { found })
    }

    /// Whether the tenants can be told apart.
    pub(crate) fn check_all(tenants: &[Self]) -> Result<()> {
        if tenants.is_empty() {
            return Err(NodeError::invalid("tenants", &"none", "at least one"));
        }
        for (idx, tenant) in tenants.iter().enumerate() {
            for other in &tenants[..idx] {
                if tenant.name == other.name {
                    return Err(NodeError::invalid("tenant", &tenant.name, "a name that no other has"));
                }
                let is_same = match (&tenant.token, &other.token) {
                    (None, None) => true,
                    (Some(own), Some(token)) => own.is(token.expose()),
                    _ => false,
                };
                if is_same {
                    let allowed = "a token that no other has; one tenant may be without";
                    return Err(NodeError::invalid("token of a tenant", &tenant.name, allowed));
                }
            }
        }
        Ok(())
    }
}
