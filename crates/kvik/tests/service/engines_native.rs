//! An engine that sleeps with its process: the calls of vLLM, answered by a server of the test beside the engine's process.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;

use crate::engines::{Bed, file, is_alive, worker};
use crate::process::{eventually, free_address};

/// What the server was asked, and what it does with it.
#[derive(Debug, Default)]
struct Fake {
    heard: Mutex<Vec<String>>,
    is_sleeping: Mutex<bool>,
    /// The path that fails.
    broken: Mutex<Option<&'static str>>,
}

impl Fake {
    /// Serves at `address` until the test ends.
    fn start(address: &str) -> Arc<Self> {
        let fake = Arc::new(Self::default());
        let (listener, serving) = (TcpListener::bind(address).unwrap(), Arc::clone(&fake));
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let fake = Arc::clone(&serving);
                thread::spawn(move || fake.serve(&stream));
            }
        });
        fake
    }

    /// Answers the requests of one connection.
    fn serve(&self, stream: &TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream);
        loop {
            let mut head = String::new();
            while reader.read_line(&mut head).ok()? > 2 {}
            let mut lines = head.lines();
            let mut words = lines.next()?.split(' ');
            let (method, path) = (words.next()?, words.next()?);
            let length =
                lines.find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
            let mut body = vec![0; length.unwrap_or(0)];
            reader.read_exact(&mut body).ok()?;
            let (status, answer) = self.answer(method, path);
            let length = answer.len();
            let kind = "content-type: application/json";
            write!(&*stream, "HTTP/1.1 {status} X\r\n{kind}\r\ncontent-length: {length}\r\n\r\n{answer}")
                .ok()?;
        }
    }

    fn answer(&self, method: &str, target: &str) -> (u16, String) {
        let path = target.split('?').next().unwrap();
        if path != "/health" {
            self.heard.lock().push(format!("{method} {target}"));
        }
        if *self.broken.lock() == Some(path) {
            return (500, "no".to_owned());
        }
        match path {
            "/sleep" => *self.is_sleeping.lock() = true,
            "/wake_up" => *self.is_sleeping.lock() = false,
            "/is_sleeping" => return (200, format!("{{\"is_sleeping\": {}}}", *self.is_sleeping.lock())),
            // An engine that sleeps must not be asked.
            "/v1/completions" if *self.is_sleeping.lock() => return (500, "asleep".to_owned()),
            _ => {}
        }
        (200, "{\"choices\": []}".to_owned())
    }

    fn take_heard(&self) -> Vec<String> {
        std::mem::take(&mut *self.heard.lock())
    }
}

#[test]
fn an_engine_sleeps_with_its_process_through_a_change_of_controllers() {
    let address = free_address();
    let (_, port) = address.rsplit_once(':').unwrap();
    let script = "[sh, -c, 'exec tail -f /dev/null']";
    let sleep = "sleep: {method: native, level: all}";
    let engines = [
        format!("  - {{name: v, kind: vllm, port: {port}, command: {script}, {sleep}}}\n"),
        worker("k", ", start: asleep"),
    ];
    let mut bed = Bed::up(&file("max_awake: 1", &engines));
    let pid = eventually("the process is there", || bed.engine("v")["pid"].as_i64());
    let fake = Fake::start(&address);
    assert_eq!(bed.send("v", 1, false).status, 200);
    assert_eq!(fake.take_heard(), ["POST /v1/completions"]);

    bed.text("k");
    assert_eq!(fake.take_heard(), ["POST /sleep?level=2", "GET /is_sleeping"]);
    assert_eq!((bed.state_of("v").as_str(), bed.pid("v")), ("asleep", pid));

    bed.process.as_mut().unwrap().kill();
    bed.start(&[]);
    assert_eq!(bed.send("v", 1, false).status, 200);
    let woken = [
        "POST /wake_up?tags=weights",
        "POST /collective_rpc",
        "POST /wake_up?tags=kv_cache",
        "GET /is_sleeping",
        "POST /v1/completions",
    ];
    assert_eq!(fake.take_heard(), woken);
    assert_eq!(bed.pid("v"), pid);

    // Without its weights it does not serve.
    assert!(bed.ask(&["sleep", "v"]).status.success());
    *fake.broken.lock() = Some("/collective_rpc");
    let mut answer = bed.send("v", 1, false);
    let text = answer.text().unwrap();
    assert_eq!(answer.status, 503, "{text}");
    assert!(text.contains("it did not wake: POST /collective_rpc: 500"), "{text}");
    assert!(!is_alive(pid));
    assert!(!fake.take_heard().contains(&"POST /v1/completions".to_owned()));
}
