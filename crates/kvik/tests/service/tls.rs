//! A coordinator that speaks TLS and asks for client certificates.

use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use crate::cluster::start;
use crate::http;

/// An authority and a certificate that it signed, as files.
struct Files {
    authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Files {
    fn make(folder: &Path) -> Self {
        let authority_key = KeyPair::generate().unwrap();
        let mut authority = CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority_certificate = authority.self_signed(&authority_key).unwrap();
        let issuer = Issuer::new(authority, authority_key);
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = certificate.signed_by(&key, &issuer).unwrap();
        let write = |name: &str, text: String| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        Self {
            authority: write("authority.pem", authority_certificate.pem()),
            certificate: write("certificate.pem", certificate.pem()),
            key: write("key.pem", key.serialize_pem()),
        }
    }

    /// Settings of a client's TLS under `field`.
    fn client(&self, field: &str) -> [String; 3] {
        [
            format!("{field}.authorities={}", self.authority.display()),
            format!("{field}.certificate={}", self.certificate.display()),
            format!("{field}.key={}", self.key.display()),
        ]
    }
}

#[test]
fn workers_and_gateways_authenticate_to_a_coordinator() {
    let folder = TempDir::new().unwrap();
    let files = Files::make(folder.path());
    let [_, certificate, key] = files.client("tls");
    let client_authorities = format!("tls.client_authorities={}", files.authority.display());
    let coordinator = start(
        "coordinator",
        "127.0.0.1:0",
        &[],
        &[&certificate, &key, &client_authorities, "heartbeat_interval_ms=100", "slow_start_ms=0"],
    );
    assert!(http::get(&coordinator.address, "/health").is_err(), "plain HTTP is not understood");
    let base = format!("https://{}", coordinator.address);

    let settings = files.client("coordinator_tls");
    let flags = ["--threads", "1", "--coordinator", &base, "--id"];
    let known = [&flags[..], &["known"]].concat();
    let _worker = start("worker", "127.0.0.1:0", &known, &settings.each_ref().map(String::as_str));
    // It trusts the coordinator, and has nothing to show.
    let nameless = [&flags[..], &["nameless"]].concat();
    let mut stranger = start("worker", "127.0.0.1:0", &nameless, &[&settings[0]]);
    stranger.process.logged("failed to register");

    let settings = files.client("backend_tls");
    let gateway =
        start("gateway", "127.0.0.1:0", &["--coordinator", &base], &settings.each_ref().map(String::as_str));
    gateway.wait_for_backends(1);
    for number in 0..16 {
        assert_eq!(gateway.served_by(&format!("sequence-{number}")), "known");
    }
}
