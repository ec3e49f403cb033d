//! How two peers prove to each other that they know the token, which itself is never sent.

use std::fmt;
use std::io::{self, Read, Write};

use super::frame::{GREETING_BYTES, MAGIC, MAX_TENANT_BYTES, NONCE_BYTES, PROOF_BYTES};

/// What peers of one cluster share.
///
/// Without TLS the proof keeps strangers out, but a stranger between the two could change what follows. Checksums find
/// accidents, not intent: use TLS where the network is not trusted.
#[derive(Clone)]
pub struct PeerToken {
    key: [u8; 32],
}

/// What both sides of a connection know after their greetings.
struct Transcript<'a> {
    client_nonce: [u8; NONCE_BYTES],
    server_nonce: [u8; NONCE_BYTES],
    tenant: &'a str,
}

impl PeerToken {
    /// The token that is made of a secret; an empty one is no token.
    pub fn from_secret(secret: &[u8]) -> Self {
        Self { key: blake3::derive_key("kvik 2026 token of store peers", secret) }
    }

    /// Greets a server as a client of `tenant`.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] where the two have different tokens or the server refuses the tenant.
    pub(super) fn greet(&self, stream: &mut (impl Read + Write), tenant: &str) -> io::Result<()> {
        let client_nonce = nonce()?;
        let mut greeting = Vec::with_capacity(GREETING_BYTES + tenant.len());
        greeting.extend(MAGIC);
        greeting.extend(client_nonce);
        greeting.extend((tenant.len() as u16).to_le_bytes());
        greeting.extend(tenant.as_bytes());
        stream.write_all(&greeting)?;
        stream.flush()?;
        let server_nonce = read_array::<NONCE_BYTES>(stream)?;
        let proof = read_array::<PROOF_BYTES>(stream)?;
        let transcript = Transcript { client_nonce, server_nonce, tenant };
        if self.proof(*b"server", &transcript) != proof {
            return Err(refused("it does not know the token"));
        }
        stream.write_all(self.proof(*b"client", &transcript).as_bytes())?;
        stream.flush()?;
        match read_array::<1>(stream)? {
            [1] => Ok(()),
            _ => Err(refused("it refuses the tenant or the token")),
        }
    }

    /// Answers the greeting of a client; returns its tenant. The caller says with [`accept`] or [`refuse`] whether it is
    /// served.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] where the two have different tokens.
    pub(super) fn answer_greeting(&self, stream: &mut (impl Read + Write)) -> io::Result<String> {
        let magic = read_array::<{ MAGIC.len() }>(stream)?;
        let client_nonce = read_array::<NONCE_BYTES>(stream)?;
        let n_bytes = usize::from(u16::from_le_bytes(read_array(stream)?));
        if magic != MAGIC || n_bytes > MAX_TENANT_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no peer of this version"));
        }
        let mut tenant = vec![0; n_bytes];
        stream.read_exact(&mut tenant)?;
        let tenant = String::from_utf8(tenant)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "its tenant is no text"))?;
        let server_nonce = nonce()?;
        let transcript = Transcript { client_nonce, server_nonce, tenant: &tenant };
        stream.write_all(&server_nonce)?;
        stream.write_all(self.proof(*b"server", &transcript).as_bytes())?;
        stream.flush()?;
        let proof = read_array::<PROOF_BYTES>(stream)?;
        // Hashes are compared in constant time.
        if self.proof(*b"client", &transcript) != proof {
            return Err(refused("it does not know the token"));
        }
        Ok(tenant)
    }

    fn proof(&self, role: [u8; 6], transcript: &Transcript<'_>) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&role);
        hasher.update(&transcript.client_nonce);
        hasher.update(&transcript.server_nonce);
        hasher.update(transcript.tenant.as_bytes());
        hasher.finalize()
    }
}

impl fmt::Debug for PeerToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("PeerToken").finish_non_exhaustive()
    }
}

/// Tells a client that it is served.
pub(super) fn accept(stream: &mut impl Write) -> io::Result<()> {
    stream.write_all(&[1])?;
    stream.flush()
}

/// Tells a client that it is not served.
pub(super) fn refuse(stream: &mut impl Write) -> io::Result<()> {
    stream.write_all(&[0])?;
    stream.flush()
}

pub(super) fn read_array<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn nonce() -> io::Result<[u8; NONCE_BYTES]> {
    let mut bytes = [0; NONCE_BYTES];
    let mut n_filled = 0;
    while n_filled < bytes.len() {
        n_filled += rustix::rand::getrandom(&mut bytes[n_filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

fn refused(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, reason)
}
