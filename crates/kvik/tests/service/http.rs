//! A blocking HTTP client that shows what is on the wire.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use serde_json::Value;

use crate::process::PATIENCE;

/// An answer whose body is still to be read.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
    /// Bytes that are left of the body; none for a chunked one.
    left: Option<usize>,
    /// Text of chunks that is not a whole event yet.
    pending: String,
}

/// Sends a request on a connection of its own.
pub(crate) fn send(address: &str, method: &str, path: &str, body: Option<&Value>) -> io::Result<Answer> {
    send_with(address, method, path, &[], body)
}

/// Sends a request with headers on a connection of its own.
pub(crate) fn send_with(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Option<&Value>,
) -> io::Result<Answer> {
    open(address, method, path, headers, body).and_then(|stream| Answer::read_head(BufReader::new(stream)))
}

/// Sends a request and reads nothing.
pub(crate) fn open(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Option<&Value>,
) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    let body = body.map(Value::to_string).unwrap_or_default();
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        request.extend([name, ": ", value, "\r\n"]);
    }
    stream.write_all(format!("{request}\r\n{body}").as_bytes())?;
    Ok(stream)
}

/// Gets `path`; fails without an answer.
pub(crate) fn get(address: &str, path: &str) -> io::Result<(u16, String)> {
    let mut answer = send(address, "GET", path, None)?;
    let body = answer.text()?;
    Ok((answer.status, body))
}

/// Gets a JSON document if it is there.
pub(crate) fn get_json(address: &str, path: &str) -> Option<Value> {
    let (status, body) = get(address, path).ok()?;
    (status == 200).then(|| serde_json::from_str(&body).unwrap())
}

impl Answer {
    fn read_head(mut reader: BufReader<TcpStream>) -> io::Result<Self> {
        let status_line = read_line(&mut reader)?;
        let status = status_line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.ok_or_else(|| broken(&format!("no status: {status_line:?}")))?;
        let mut headers = Vec::new();
        loop {
            let line = read_line(&mut reader)?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').ok_or_else(|| broken("no header"))?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let mut answer = Self { status, headers, reader, left: None, pending: String::new() };
        answer.left = answer.header("content-length").map(|length| length.parse().unwrap());
        Ok(answer)
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(held, _)| held == name).map(|(_, value)| value.as_str())
    }

    /// The worker that answered.
    #[track_caller]
    pub(crate) fn worker(&self) -> String {
        self.header("x-kvik-worker").unwrap_or_else(|| panic!("no worker named: {self:?}")).to_owned()
    }

    /// The rest of the body; an error if it breaks off.
    pub(crate) fn text(&mut self) -> io::Result<String> {
        let mut text = std::mem::take(&mut self.pending);
        while let Some(chunk) = self.chunk()? {
            text.push_str(&chunk);
        }
        Ok(text)
    }

    /// Data of the next server-sent event; none after the proper end of the body.
    pub(crate) fn event(&mut self) -> io::Result<Option<String>> {
        loop {
            if let Some(end) = self.pending.find("\n\n") {
                let event: String = self.pending.drain(..end + 2).collect();
                if let Some(data) = event.trim_end().strip_prefix("data: ") {
                    return Ok(Some(data.to_owned()));
                }
                continue;
            }
            match self.chunk()? {
                Some(chunk) => self.pending.push_str(&chunk),
                None if self.pending.is_empty() => return Ok(None),
                None => return Err(broken("the body ends within an event")),
            }
        }
    }

    /// Data of all events that are left.
    pub(crate) fn events(&mut self) -> io::Result<Vec<String>> {
        let mut events = Vec::new();
        while let Some(event) = self.event()? {
            events.push(event);
        }
        Ok(events)
    }

    fn chunk(&mut self) -> io::Result<Option<String>> {
        if let Some(left) = self.left {
            let bytes = self.take(left)?;
            self.left = Some(0);
            return Ok((0 < left).then_some(bytes));
        }
        let line = read_line(&mut self.reader)?;
        let length = usize::from_str_radix(&line, 16).map_err(|_| broken(&format!("no chunk: {line:?}")))?;
        let chunk = self.take(length)?;
        read_line(&mut self.reader)?;
        if length == 0 {
            self.left = Some(0);
            return Ok(None);
        }
        Ok(Some(chunk))
    }

    fn take(&mut self, length: usize) -> io::Result<String> {
        let mut bytes = vec![0; length];
        self.reader.read_exact(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| broken("a chunk that is not UTF-8"))
    }
}

fn read_line(reader: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    match line.strip_suffix("\r\n") {
        Some(line) => Ok(line.to_owned()),
        None => Err(broken("the connection ended")),
    }
}

fn broken(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}
