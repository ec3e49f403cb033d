//! A server that answers as LMCache's does: values in a map, the last one stays, and no deletion.

use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use kvik_tier::{LM_REQUEST_BYTES, LmCommand, LmForm, LmReply, LmRequest};
use parking_lot::Mutex;

/// A server on threads of its own, until the process ends.
#[derive(Clone)]
pub(crate) struct MapServer {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    values: HashMap<String, (LmForm, Vec<u8>)>,
    commands: Vec<LmCommand>,
}

impl MapServer {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = Self { address: listener.local_addr().unwrap(), state: Arc::default() };
        let serving = server.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let serving = serving.clone();
                // The end of a client is the end of its thread.
                thread::spawn(move || drop(serving.serve(&mut stream.unwrap())));
            }
        });
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("lm://{}", self.address)
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.state.lock().values.keys().cloned().collect()
    }

    pub(crate) fn n_value_bytes(&self) -> usize {
        self.state.lock().values.values().map(|(_, value)| value.len()).sum()
    }

    pub(crate) fn commands(&self) -> Vec<LmCommand> {
        self.state.lock().commands.clone()
    }

    fn serve(&self, stream: &mut TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        loop {
            let mut frame = [0; LM_REQUEST_BYTES];
            stream.read_exact(&mut frame)?;
            let request = LmRequest::decode(&frame).ok_or(io::ErrorKind::InvalidData)?;
            let key = request.key.as_str().to_owned();
            self.state.lock().commands.push(request.command);
            match request.command {
                LmCommand::Put => {
                    let mut value = vec![0; request.n_bytes];
                    stream.read_exact(&mut value)?;
                    self.state.lock().values.insert(key, (request.form, value));
                }
                LmCommand::Get => {
                    let value = self.state.lock().values.get(&key).cloned();
                    let Some((form, value)) = value else {
                        stream.write_all(&LmReply::NOT_FOUND.encode())?;
                        continue;
                    };
                    let reply = LmReply { is_found: true, n_bytes: value.len(), form };
                    stream.write_all(&reply.encode())?;
                    stream.write_all(&value)?;
                }
                LmCommand::Exist => {
                    let is_found = self.state.lock().values.contains_key(&key);
                    stream.write_all(&LmReply { is_found, ..LmReply::NOT_FOUND }.encode())?;
                }
                LmCommand::Health => stream.write_all(&LmReply::FOUND.encode())?,
            }
        }
    }
}
