//! A raw-socket client for tests, which can also misbehave.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value as Json;

/// A response.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> Json {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The `data: ` of each event; the last one must be the end.
    pub fn events(&self) -> Vec<Json> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"), "{self:?}");
        let text = self.text();
        let mut data: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{text}");
        data.into_iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }

    /// Lines of JSON.
    pub fn lines(&self) -> Vec<Json> {
        assert_eq!(self.header("content-type"), Some("application/x-ndjson"), "{self:?}");
        self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// A connection.
pub struct Connection<S: Read + Write = TcpStream> {
    stream: BufReader<S>,
}

impl Connection {
    pub fn open(address: SocketAddr) -> Connection {
        let stream = TcpStream::connect(address).unwrap();
        // So that tests fail instead of hanging.
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
        Connection { stream: BufReader::new(stream) }
    }

    /// Closes the write side.
    pub fn end(&mut self) {
        // The server may have closed it.
        let _ = self.stream.get_ref().shutdown(std::net::Shutdown::Write);
    }

    /// Whether the server has closed the connection without sending anything.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.fill_buf(), Ok([]) | Err(_))
    }
}

impl<S: Read + Write> Connection<S> {
    pub fn over(stream: S) -> Connection<S> {
        Connection { stream: BufReader::new(stream) }
    }

    /// Writes; fails if the server has closed the connection.
    pub fn write(&mut self, bytes: &[u8]) -> bool {
        self.stream.get_mut().write_all(bytes).and_then(|()| self.stream.get_mut().flush()).is_ok()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Head of a response.
    pub fn head(&mut self) -> Answer {
        let line = self.line();
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status in `{line}`"));
        let mut headers = Vec::new();
        loop {
            let line = self.line();
            let Some((name, value)) = line.split_once(':') else { break };
            headers.push((name.to_lowercase(), value.trim().to_owned()));
        }
        Answer { status, headers, body: Vec::new() }
    }

    /// A chunk of a chunked body; empty at its end.
    pub fn chunk(&mut self) -> Vec<u8> {
        let size = self.line();
        let size = usize::from_str_radix(&size, 16).unwrap_or_else(|_| panic!("no size of a chunk in `{size}`"));
        let mut chunk = vec![0; size];
        self.stream.read_exact(&mut chunk).unwrap();
        self.line();
        chunk
    }

    pub fn answer(&mut self) -> Answer {
        let mut answer = self.head();
        if answer.header("transfer-encoding") == Some("chunked") {
            loop {
                let chunk = self.chunk();
                if chunk.is_empty() {
                    return answer;
                }
                answer.body.extend(chunk);
            }
        }
        let length = answer.header("content-length").map_or(0, |length| length.parse().unwrap());
        answer.body.resize(length, 0);
        self.stream.read_exact(&mut answer.body).unwrap();
        answer
    }
}

/// A serialised request.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\n");
    let has = |name: &str| headers.iter().any(|(own, _)| own.eq_ignore_ascii_case(name));
    if !has("host") {
        text += "host: localhost\r\n";
    }
    if !body.is_empty() && !has("content-length") && !has("transfer-encoding") {
        text += &format!("content-length: {}\r\n", body.len());
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    [text.as_bytes(), b"\r\n", body].concat()
}

/// Sends a request on a new connection.
pub fn send(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    let mut connection = Connection::open(address);
    connection.write(&request(method, path, headers, body));
    // Its Content-Length is that of a GET response's body.
    if method == "HEAD" { connection.head() } else { connection.answer() }
}

pub fn get(address: SocketAddr, path: &str) -> Answer {
    send(address, "GET", path, &[], &[])
}

pub fn post(address: SocketAddr, path: &str, body: &Json) -> Answer {
    send(address, "POST", path, &[("content-type", "application/json")], body.to_string().as_bytes())
}

/// The response to a valid request.
pub fn done(address: SocketAddr, path: &str, body: Json) -> Answer {
    let answer = post(address, path, &body);
    assert_eq!(answer.status, 200, "{path} {body}: {}", answer.text());
    answer
}
