//! The client without a server.

use std::io::{self, Read};

use kvik_types::{RedisEndpoint as Endpoint, RedisUrl};

use super::resp::{Reply, ReplyReader, ValueReply};
use super::server_error::ServerError;
use super::slots::{SlotRange, parse_slots, slot_of_tag};
use super::{RedisOptions, RedisTier};
use crate::error::TierError;
use crate::remote::RemoteUrl;

/// Gives its bytes in pieces of a fixed length, as a network may.
struct Dribble<'a> {
    bytes: &'a [u8],
    piece_bytes: usize,
}

impl Read for Dribble<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n_bytes = self.piece_bytes.min(buffer.len()).min(self.bytes.len());
        let (piece, rest) = self.bytes.split_at(n_bytes);
        buffer[..n_bytes].copy_from_slice(piece);
        self.bytes = rest;
        Ok(n_bytes)
    }
}

fn readers(bytes: &[u8]) -> impl Iterator<Item = ReplyReader<Dribble<'_>>> {
    [1, 2, 3, 7, 1 << 20].into_iter().map(|piece_bytes| ReplyReader::new(Dribble { bytes, piece_bytes }))
}

fn tcp(host: &str, port: u16) -> Endpoint {
    Endpoint::Tcp { host: host.to_owned(), port }
}

#[test]
fn replies_are_read_however_they_are_cut() {
    let bytes = b"+OK\r\n-ERR no\r\n:42\r\n$3\r\na\r\n\r\n$-1\r\n*2\r\n:1\r\n*1\r\n$0\r\n\r\n*-1\r\n";
    for mut reader in readers(bytes) {
        let mut next = || reader.read_reply().unwrap();
        assert_eq!(next(), Reply::Status("OK".to_owned()));
        assert_eq!(next(), Reply::Error("ERR no".to_owned()));
        assert_eq!(next(), Reply::Integer(42));
        assert_eq!(next(), Reply::Bytes(b"a\r\n".to_vec()));
        assert_eq!(next(), Reply::Nil);
        let nested = Reply::Array(vec![Reply::Bytes(Vec::new())]);
        assert_eq!(next(), Reply::Array(vec![Reply::Integer(1), nested]));
        assert_eq!(next(), Reply::Nil);
        assert_eq!(reader.read_reply().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}

#[test]
fn values_go_into_the_buffer_and_the_next_reply_follows() {
    let value: Vec<u8> = (0..100_000_u32).map(|byte| byte as u8).collect();
    let mut bytes = format!("${}\r\n", value.len()).into_bytes();
    bytes.extend_from_slice(&value);
    bytes.extend_from_slice(b"\r\n$3\r\nabc\r\n$-1\r\n-OOM full\r\n:7\r\n");
    for mut reader in readers(&bytes) {
        let mut buffer = vec![0; value.len()];
        assert_eq!(reader.read_value(&mut buffer).unwrap(), ValueReply::Filled);
        assert!(buffer == value);
        assert_eq!(reader.read_value(&mut buffer).unwrap(), ValueReply::OtherLength(3));
        assert_eq!(reader.read_value(&mut buffer).unwrap(), ValueReply::Nil);
        assert_eq!(reader.read_value(&mut buffer).unwrap(), ValueReply::Error("OOM full".to_owned()));
        assert_eq!(reader.read_reply().unwrap(), Reply::Integer(7));
    }
}

#[test]
fn what_is_not_the_protocol_is_refused_before_memory_is_taken() {
    let deep = b"*1\r\n".repeat(20);
    let long = vec![b'+'; 100_000];
    let cases: [&[u8]; 12] = [
        b"HTTP/1.1 200 OK\r\n",
        b"+OK\n",
        b"\r\n",
        b"$-2\r\n",
        b"$99999999999\r\n",
        b"$3\r\nabcde",
        b"*-5\r\n",
        b"*9999999999\r\n",
        b":4x\r\n",
        b"$9223372036854775808\r\n",
        &deep,
        &long,
    ];
    for case in cases {
        for mut reader in readers(case) {
            let error = reader.read_reply().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{:?}", String::from_utf8_lossy(case));
        }
    }
    for mut reader in readers(b"$4\r\nabcdxx") {
        assert_eq!(reader.read_value(&mut [0; 4]).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}

#[test]
fn slots_are_those_of_the_servers() {
    // The check value of the checksum, and slots that `CLUSTER KEYSLOT` gives.
    assert_eq!(slot_of_tag(b"123456789"), 0x31c3);
    assert_eq!(slot_of_tag(b"foo"), 12182);
    assert_eq!(slot_of_tag(b""), 0);
}

#[test]
fn the_slots_of_a_cluster_are_understood() {
    let bytes = b"*2\r\n*3\r\n:8000\r\n:16383\r\n*3\r\n$3\r\nb.c\r\n:7001\r\n$2\r\nid\r\n\
        *4\r\n:0\r\n:7999\r\n*3\r\n$0\r\n\r\n:7000\r\n$2\r\nid\r\n*3\r\n$1\r\nr\r\n:1\r\n$2\r\nid\r\n";
    let reply = ReplyReader::new(&bytes[..]).read_reply().unwrap();
    let expected = vec![
        SlotRange { first: 0, last: 7999, endpoint: tcp("asked", 7000) },
        SlotRange { first: 8000, last: 16383, endpoint: tcp("b.c", 7001) },
    ];
    assert_eq!(parse_slots(&reply, &tcp("asked", 1)), Some(expected));
    let overlapping =
        b"*2\r\n*3\r\n:0\r\n:10\r\n*2\r\n$1\r\na\r\n:1\r\n*3\r\n:10\r\n:11\r\n*2\r\n$1\r\na\r\n:1\r\n";
    let reply = ReplyReader::new(&overlapping[..]).read_reply().unwrap();
    assert_eq!(parse_slots(&reply, &tcp("asked", 1)), None);
    assert_eq!(parse_slots(&Reply::Array(Vec::new()), &tcp("asked", 1)), None);
}

#[test]
fn errors_of_the_server_say_what_to_do() {
    let asked = tcp("a", 1);
    let redirection = |message: &str| ServerError::parse(message).redirection(&asked);
    assert_eq!(redirection("MOVED 3999 127.0.0.1:6381"), Some((tcp("127.0.0.1", 6381), false)));
    assert_eq!(redirection("MOVED 3999 :6381"), Some((tcp("a", 6381), false)));
    assert_eq!(redirection("ASK 3999 ::1:6381"), Some((tcp("::1", 6381), true)));
    assert_eq!(redirection("MOVED 3999"), None);
    assert_eq!(ServerError::parse("OOM command not allowed"), ServerError::NoRoom);
    assert!(matches!(ServerError::parse("READONLY You can't write"), ServerError::ReadOnly(_)));
    assert!(ServerError::parse("LOADING Redis is loading").to_error("x").is_transient());
    assert!(!ServerError::parse("NOAUTH Authentication required.").to_error("x").is_transient());
}

#[test]
fn a_url_is_printed_without_its_password() {
    for text in ["redis://u:hunter2@h:1/3", "rediss+cluster://:hunter2@h:1", "unix://:hunter2@/s?db=1"] {
        let url = text.parse::<RedisUrl>().unwrap();
        let tier = RedisTier::open(&url, &RedisOptions { ca_file: None, ..RedisOptions::default() }).unwrap();
        for printed in [format!("{url}"), format!("{url:?}"), format!("{tier:?}")] {
            assert!(!printed.contains("hunter2"), "{printed}");
        }
    }
    for text in
        ["redis://:hunter2@", "hunter2", "x hunter2://h", "s3://b/p?token=hunter2", "s3://u:hunter2@b"]
    {
        let error = text.parse::<RemoteUrl>().unwrap_err();
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }
}

#[test]
fn wrong_options_are_refused() {
    let url = "redis://host".parse::<RedisUrl>().unwrap();
    let default = RedisOptions::default;
    for options in [
        RedisOptions { key_prefix: String::new(), ..default() },
        RedisOptions { key_prefix: "a{b}".to_owned(), ..default() },
        RedisOptions { n_connections: 0, ..default() },
        RedisOptions { min_bytes_per_s: 0, ..default() },
        RedisOptions { ttl: Some(std::time::Duration::ZERO), ..default() },
        RedisOptions { response_timeout: std::time::Duration::ZERO, ..default() },
    ] {
        let opened = RedisTier::open(&url, &options);
        assert!(matches!(opened, Err(TierError::Invalid { .. })), "{options:?}");
    }
}
