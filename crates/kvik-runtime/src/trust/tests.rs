use axum::routing::get;
use tower::ServiceExt as _;

use super::*;

const CLUSTER: &str = "cluster-token-0123456789";
const ADMIN: &str = "admin-token-0123456789";
const LOCAL: &str = "127.0.0.1:1000";
const REMOTE: &str = "192.0.2.7:1000";

fn trust(cluster: Option<&str>, admin: Option<&str>, has_mtls: bool) -> Trust {
    let (cluster, admin) = (cluster.map(Secret::from), admin.map(Secret::from));
    let client_authorities = has_mtls.then(|| PathBuf::from("ca.pem"));
    let settings = TrustSettings {
        cluster_token: cluster.as_ref(),
        admin_token: admin.as_ref(),
        ..TrustSettings::default()
    };
    settings.read(&TlsServerConfig { client_authorities, ..TlsServerConfig::default() }).unwrap()
}

fn showing(token: Option<&str>) -> HeaderMap {
    token.map(|token| (TOKEN_HEADER, token.parse().unwrap())).into_iter().collect()
}

fn check(trust: &Trust, token: Option<&str>, peer: &str, scope: Scope) -> Option<u16> {
    let checked = trust.check(&showing(token), Some(peer.parse().unwrap()), scope);
    checked.err().map(|denied| denied.status().as_u16())
}

#[test]
fn only_holders_of_a_token_are_served_where_there_is_one() {
    let (both, one) = (trust(Some(CLUSTER), Some(ADMIN), false), trust(Some(CLUSTER), None, false));
    for peer in [LOCAL, REMOTE] {
        for (trust, token, of_cluster, of_admin) in [
            (&both, None, Some(401), Some(401)),
            (&both, Some("wrong"), Some(401), Some(401)),
            (&both, Some(CLUSTER), None, Some(403)),
            (&both, Some(ADMIN), None, None),
            (&one, None, Some(401), Some(401)),
            (&one, Some(ADMIN), Some(401), Some(401)),
            (&one, Some(CLUSTER), None, None),
        ] {
            assert_eq!(check(trust, token, peer, Scope::Cluster), of_cluster, "{token:?}");
            assert_eq!(check(trust, token, peer, Scope::Admin), of_admin, "{token:?}");
        }
    }
}

#[test]
fn without_tokens_the_administrator_is_on_loopback_or_has_a_certificate() {
    let none = trust(None, None, false);
    assert_eq!(check(&none, None, REMOTE, Scope::Cluster), None);
    for (peer, status) in
        [(LOCAL, None), ("[::1]:1", None), ("[::ffff:127.0.0.1]:1", None), (REMOTE, Some(403))]
    {
        assert_eq!(check(&none, None, peer, Scope::Admin), status, "{peer}");
    }
    assert_eq!(none.check(&HeaderMap::new(), None, Scope::Admin), Err(Denied::NotLoopback));
    assert_eq!(check(&trust(None, None, true), None, REMOTE, Scope::Admin), None);
    let admin = trust(None, Some(ADMIN), true);
    assert_eq!(check(&admin, None, LOCAL, Scope::Admin), Some(401));
    assert_eq!(check(&admin, None, LOCAL, Scope::Cluster), None);
    assert_eq!(check(&admin, Some(ADMIN), REMOTE, Scope::Admin), None);
}

#[test]
fn a_listener_beyond_loopback_needs_a_credential_or_the_word_insecure() {
    let (none, insecure) = (Trust::default(), Trust { is_insecure: true, ..Trust::default() });
    let at = |trust: &Trust, address: &str| trust.check_listener("listen", address.parse().unwrap(), false);
    for address in [LOCAL, "127.9.9.9:1", "[::1]:1"] {
        at(&none, address).unwrap();
    }
    for address in [REMOTE, "0.0.0.0:1", "[::]:1", "[2001:db8::1]:1"] {
        let error = at(&none, address).unwrap_err().to_string();
        assert!(error.contains(&format!("`listen` is {address}, which other machines can reach")), "{error}");
        assert!(error.contains("`cluster_token`") && error.contains("`insecure: true`"), "{error}");
        for trusted in [trust(Some(CLUSTER), None, false), trust(None, None, true), insecure.clone()] {
            at(&trusted, address).unwrap();
        }
        at(&trust(None, Some(ADMIN), false), address).unwrap_err();
        none.check_listener("listen", address.parse().unwrap(), true).unwrap();
    }
}

#[test]
fn a_token_comes_from_the_setting_or_from_a_file_and_is_never_printed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    std::fs::write(&file, format!("{CLUSTER}\n")).unwrap();
    let from_file = TrustSettings { cluster_token_file: Some(&file), ..TrustSettings::default() };
    let read = from_file.read(&TlsServerConfig::default()).unwrap();
    assert_eq!(check(&read, Some(CLUSTER), REMOTE, Scope::Cluster), None);
    let (name, value) = read.cluster_header().unwrap();
    assert_eq!((name, value.as_bytes()), (TOKEN_HEADER, CLUSTER.as_bytes()));
    assert!(!format!("{from_file:?} {read:?} {value:?}").contains(CLUSTER));

    let token = Secret::from(CLUSTER);
    let message =
        |settings: TrustSettings<'_>| settings.read(&TlsServerConfig::default()).unwrap_err().to_string();
    assert!(message(TrustSettings { cluster_token: Some(&token), ..from_file }).contains("one of the two"));
    assert!(message(TrustSettings { admin_token: Some(&token), ..from_file }).contains("the same as"));
    for wrong in ["", "short", "has a space and is long enough", "umlaut-\u{e4}-0123456789"] {
        let wrong = Secret::from(wrong);
        let message = message(TrustSettings { admin_token: Some(&wrong), ..TrustSettings::default() });
        assert!(message.contains("`admin_token` is text of"), "{message}");
        assert!(message.contains("16 to 4096 printable") && !message.contains("umlaut"), "{message}");
    }
}

#[tokio::test]
async fn a_router_serves_what_is_open_and_the_rest_by_its_scope() {
    let trust = Arc::new(trust(Some(CLUSTER), Some(ADMIN), false));
    let admin = trust.admins_only(Router::new().route("/drain", get(async || "drained")));
    let members =
        Router::new().route("/health", get(async || "ok")).route("/kv", get(async || "kv")).merge(admin);
    let router: Router = trust.members_only(members, &["/health"]);
    for (path, token, status) in [
        ("/health", None, 200),
        ("/kv", None, 401),
        ("/kv", Some(CLUSTER), 200),
        ("/none", None, 401),
        ("/none", Some(CLUSTER), 404),
        ("/health/", None, 401),
        ("/drain", None, 401),
        ("/drain", Some(CLUSTER), 403),
        ("/drain", Some(ADMIN), 200),
    ] {
        let mut request = Request::get(path).body(Body::empty()).unwrap();
        request.headers_mut().extend(showing(token));
        let response = router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{path} {token:?}");
    }
}
