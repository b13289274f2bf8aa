//! Connections: a limit on their number, and on the time and size of headers, with or without TLS.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, TcpListener as StdListener};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tilewright::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{AcquireError, Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, MissedTickBehavior, Sleep, interval, sleep, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;

use super::Sinks;
use super::files::{FileVersion, versions};
use super::limits::Limits;
use super::metrics::Metrics;

/// How often [`Connections::sweep`] is called.
const SWEEP: Duration = Duration::from_secs(1);

/// Delay after a failed accept, such as for lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// Minimum idle time before a connection is closed to admit another; distant clients need that long.
const GRACE: Duration = Duration::from_millis(200);

/// Bytes of an answer buffered in a connection's socket.
const MAX_UNSENT: usize = 128 << 10;

/// TLS for connections. Reloads the certificate and key files when they change, as on renewal.
pub struct Tls {
    certificates: PathBuf,
    key: PathBuf,
    current: Mutex<(TlsAcceptor, Vec<FileVersion>)>,
}

impl Tls {
    /// Reads the certificates and their key.
    ///
    /// # Errors
    /// [`Error::Option`] naming the unusable file.
    pub fn open(certificates: PathBuf, key: PathBuf) -> Result<Tls, Error> {
        // Before reading, so that a later change is noticed.
        let version = versions([&certificates, &key]);
        let acceptor = read(&certificates, &key)?;
        Ok(Tls { certificates, key, current: Mutex::new((acceptor, version)) })
    }

    fn acceptor(&self) -> TlsAcceptor {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// Reloads changed files. On an error the earlier certificate stays in use until the files change again: one of
    /// the two may have been written first.
    pub fn refresh(&self, sinks: &Sinks) {
        let version = versions([&self.certificates, &self.key]);
        if self.current.lock().unwrap_or_else(PoisonError::into_inner).1 == version {
            return;
        }
        let read = read(&self.certificates, &self.key);
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.1 = version;
        match read {
            Ok(acceptor) => {
                current.0 = acceptor;
                (sinks.events)("the TLS certificate was read again");
            }
            Err(error) => (sinks.report)(&format!("the previous certificate stays in use: {error}")),
        }
    }
}

fn read(certificates: &Path, key: &Path) -> Result<TlsAcceptor, Error> {
    let refused = |option, path: &Path, reason: &dyn std::fmt::Display, expected: &str| Error::Option {
        option,
        expected: expected.into(),
        found: format!("`{}` ({reason})", path.display()),
    };
    let bytes = |path: &Path| {
        let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
        // Ignore a byte order mark.
        Ok::<_, Error>(bytes.strip_prefix(b"\xef\xbb\xbf").map(<[u8]>::to_vec).unwrap_or(bytes))
    };
    let (of_chain, of_key) = ("a certificate chain in PEM", "a private key in PEM, without a password");
    let chain = CertificateDer::pem_slice_iter(&bytes(certificates)?).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| refused("tls_cert", certificates, &error, of_chain))?;
    if chain.is_empty() {
        return Err(refused("tls_cert", certificates, &"no certificate in it", of_chain));
    }
    let own = PrivateKeyDer::from_pem_slice(&bytes(key)?).map_err(|error| match error {
        pem::Error::NoItemsFound => refused("tls_key", key, &"no private key in it", of_key),
        error => refused("tls_key", key, &error, of_key),
    })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.and_then(|config| config.with_no_client_auth().with_single_cert(chain, own));
    let expected = "a certificate chain that fits the private key";
    let mut config = config.map_err(|error| refused("tls_cert", certificates, &error, expected))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Shared by all connections.
#[derive(Clone)]
pub struct Connections {
    pub limits: Limits,
    pub metrics: Arc<Metrics>,
    pub tls: Option<Arc<Tls>>,
    /// Called every second: unloads idle models, reads changed files again.
    pub sweep: Arc<dyn Fn() + Send + Sync>,
}

impl Connections {
    /// Accepts connections until `end`, then waits for the busy ones.
    pub async fn run(self, listener: StdListener, router: Router, end: impl Future<Output = ()>) -> io::Result<()> {
        let listener = TcpListener::from_std(listener)?;
        let drain = self.limits.drain;
        let sweep = self.sweep.clone();
        let sweeper = tokio::spawn(async move {
            let mut clock = interval(SWEEP);
            clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                clock.tick().await;
                sweep();
            }
        });
        let (stop, stopped) = oneshot::channel();
        // On a runtime thread, which then serves the accepted connection: the caller's thread would have to wake
        // another one each time.
        let accepting = tokio::spawn(self.accept(listener, router, stopped));
        end.await;
        let _ = stop.send(());
        let graceful = accepting.await.map_err(io::Error::other)?;
        sweeper.abort();
        let _ = timeout(drain, graceful.shutdown()).await;
        Ok(())
    }

    /// Accepts connections until stopped. Returns a handle that waits for the open ones.
    async fn accept(
        self,
        listener: TcpListener,
        router: Router,
        mut stopped: oneshot::Receiver<()>,
    ) -> GracefulShutdown {
        let permits = Arc::new(Semaphore::new(self.limits.connections));
        let idle = Arc::new(IdleConnections::default());
        let graceful = GracefulShutdown::new();
        loop {
            // If all are busy, one connection waits here and further ones in the system's backlog.
            let taken = async {
                let (stream, peer) = listener.accept().await?;
                let room = tokio::select! {
                    biased;
                    room = permits.clone().acquire_owned() => room,
                    room = idle.make_room(&permits) => room,
                };
                Ok::<_, io::Error>((stream, peer.ip(), room))
            };
            let taken = tokio::select! {
                taken = taken => taken,
                _ = &mut stopped => return graceful,
            };
            let Ok((stream, peer, room)) = taken else {
                sleep(PAUSE).await;
                continue;
            };
            let (this, router, watcher) = (self.clone(), router.clone(), graceful.watcher());
            let entry = Arc::new(IdleEntry::new(&idle));
            tokio::spawn(async move {
                let _room = room;
                let _connected = this.metrics.connected();
                // Send each token without delay.
                let _ = stream.set_nodelay(true);
                let served = async {
                    match &this.tls {
                        None => this.serve(stream, peer, router, watcher, &entry).await,
                        Some(tls) => {
                            let accepted = tls.acceptor().accept(stream);
                            if let Ok(Ok(stream)) = timeout(this.limits.header_time, accepted).await {
                                this.serve(stream, peer, router, watcher, &entry).await;
                            }
                        }
                    }
                };
                tokio::select! {
                    () = served => {}
                    () = entry.closed.notified() => {}
                }
            });
        }
    }

    /// Serves a connection and ignores its errors, which are the client's.
    async fn serve(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
        peer: IpAddr,
        router: Router,
        watcher: Watcher,
        entry: &Arc<IdleEntry>,
    ) {
        let limits = &self.limits;
        let service = TowerToHyperService::new(router);
        let heads = Arc::new(Mutex::new(HeadScanner::new(limits.header_bytes)));
        let service = service_fn(|mut request: Request<Incoming>| {
            request.extensions_mut().insert(Arc::new(AtWork::new(entry)));
            let has_two_lengths = heads.lock().unwrap_or_else(PoisonError::into_inner).has_two_lengths;
            request.extensions_mut().insert(Framing { has_two_lengths });
            request.extensions_mut().insert(Peer(peer));
            service.call(request)
        });
        let stream = TimeoutStream {
            stream,
            most: limits.write_time,
            waiting: None,
            heads: heads.clone(),
            entry: entry.clone(),
        };
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header_time)
            .max_headers(limits.headers)
            .max_header_size(limits.header_bytes)
            .max_buf_size(MAX_UNSENT.max(limits.header_bytes))
            .serve_connection(TokioIo::new(stream), service);
        let _ = watcher.watch(connection).await;
    }
}

/// Idle connections: first those without an answer so far, then by the start of their wait. They are closed to admit
/// others, so that silent or slow clients cannot block the server.
#[derive(Default)]
struct IdleConnections {
    waiting: Mutex<IdleQueue>,
    /// Notified of each new one.
    more: Notify,
}

/// Whether the connection had an answer, and a sequence number.
type Number = (bool, u64);

#[derive(Default)]
struct IdleQueue {
    next: u64,
    connections: BTreeMap<Number, (Instant, Arc<Notify>)>,
}

impl IdleConnections {
    fn with<T>(&self, work: impl FnOnce(&mut IdleQueue) -> T) -> T {
        work(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Closes the connection idle for longest, as soon as there is one, and takes its permit.
    async fn make_room(&self, permits: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, AcquireError> {
        loop {
            let more = self.more.notified();
            let longest = self.with(|waiting| match waiting.connections.first_entry() {
                Some(first) if first.get().0.elapsed() >= GRACE => Some(Ok(first.remove().1)),
                first => first.map(|first| Err(first.get().0 + GRACE)),
            });
            match longest {
                Some(Ok(closed)) => break closed.notify_one(),
                Some(Err(until)) => sleep_until(until).await,
                None => more.await,
            }
        }
        permits.clone().acquire_owned().await
    }
}

/// A connection's entry among the idle ones. It is idle when all output is sent and every request in progress waits
/// for its body.
struct IdleEntry {
    idle: Arc<IdleConnections>,
    state: Mutex<IdleState>,
    closed: Arc<Notify>,
}

#[derive(Default)]
struct IdleState {
    /// Its key among the idle ones.
    number: Option<Number>,
    had_answer: bool,
    n_at_work: usize,
    /// The part of those whose body is awaited.
    n_awaiting: usize,
    /// A request is done, but its answer may still be buffered.
    is_unsent: bool,
}

impl IdleEntry {
    fn new(idle: &Arc<IdleConnections>) -> IdleEntry {
        let entry = IdleEntry { idle: idle.clone(), state: Mutex::default(), closed: Arc::default() };
        entry.update(|_| ());
        entry
    }

    /// Changes the state, and lists or unlists the connection as idle.
    fn update(&self, change: impl FnOnce(&mut IdleState)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        let waits = state.n_at_work == state.n_awaiting && !state.is_unsent;
        if waits == state.number.is_some() {
            return;
        }
        self.idle.with(|waiting| match state.number.take() {
            Some(number) => {
                waiting.connections.remove(&number);
            }
            None => {
                let own = (state.had_answer, waiting.next);
                waiting.connections.insert(own, (Instant::now(), self.closed.clone()));
                state.number = Some(own);
                waiting.next += 1;
            }
        });
        if waits {
            self.idle.more.notify_one();
        }
    }

    /// All output was flushed.
    fn flushed(&self) {
        self.update(|state| state.is_unsent = false);
    }
}

impl Drop for IdleEntry {
    fn drop(&mut self) {
        self.update(|state| state.is_unsent = true);
    }
}

/// A request in progress: its connection is not closed to admit others.
pub struct AtWork(Arc<IdleEntry>);

impl AtWork {
    fn new(entry: &Arc<IdleEntry>) -> AtWork {
        entry.update(|state| state.n_at_work += 1);
        AtWork(entry.clone())
    }

    /// Marks the request's body as awaited until the result is dropped.
    pub fn awaits_body(self: Arc<Self>) -> AwaitsBody {
        self.0.update(|state| state.n_awaiting += 1);
        AwaitsBody(self)
    }
}

impl Drop for AtWork {
    /// The answer is handed to the connection but not yet written.
    fn drop(&mut self) {
        self.0.update(|state| {
            state.n_at_work -= 1;
            (state.had_answer, state.is_unsent) = (true, true);
        });
    }
}

/// Marks a body as awaited.
pub struct AwaitsBody(Arc<AtWork>);

impl Drop for AwaitsBody {
    fn drop(&mut self) {
        self.0.0.update(|state| state.n_awaiting -= 1);
    }
}

/// The address that a request comes from.
#[derive(Clone, Copy)]
pub struct Peer(pub IpAddr);

/// Framing of a request that its parsed headers no longer show.
#[derive(Clone, Copy)]
pub struct Framing {
    /// Whether it had both `Content-Length` and `Transfer-Encoding`, which readers may split differently
    /// (RFC 9112, 6.1).
    pub has_two_lengths: bool,
}

/// Scans request heads as they arrive, since hyper drops `Content-Length` from a request with `Transfer-Encoding`. A
/// head with the latter is the last one, so that no chunked body has to be parsed.
struct HeadScanner {
    /// The head received so far.
    head: Vec<u8>,
    most: usize,
    /// Bytes of the body still to skip.
    n_skipped: u64,
    /// No further head is scanned.
    is_over: bool,
    has_two_lengths: bool,
}

impl HeadScanner {
    fn new(most: usize) -> HeadScanner {
        HeadScanner { head: Vec::new(), most, n_skipped: 0, is_over: false, has_two_lengths: false }
    }

    fn read(&mut self, mut bytes: &[u8]) {
        while !self.is_over && !bytes.is_empty() {
            if self.n_skipped > 0 {
                let n = self.n_skipped.min(bytes.len() as u64);
                self.n_skipped -= n;
                bytes = bytes.get(n as usize..).unwrap_or_default();
                continue;
            }
            let Some(at) = bytes.iter().position(|&byte| byte == b'\n') else {
                self.head.extend_from_slice(bytes);
                break;
            };
            let (line, rest) = bytes.split_at(at + 1);
            self.head.extend_from_slice(line);
            bytes = rest;
            // Skip empty lines before a request.
            let ends = self.head.ends_with(b"\n\n") || self.head.ends_with(b"\n\r\n");
            if self.head.iter().all(u8::is_ascii_whitespace) {
                self.head.clear();
            } else if ends {
                self.end();
            }
        }
        // A longer request is refused for its size.
        self.is_over |= self.head.len() > self.most.saturating_add(2);
    }

    fn end(&mut self) {
        let (mut length, mut is_coded) = (None, false);
        for line in self.head.split(|&byte| byte == b'\n').skip(1) {
            let Some(colon) = line.iter().position(|&byte| byte == b':') else { continue };
            let (name, value) = line.split_at(colon);
            if name.trim_ascii().eq_ignore_ascii_case(b"content-length") {
                let value = value.get(1..).unwrap_or_default().trim_ascii();
                // An invalid number is refused elsewhere.
                length = Some(std::str::from_utf8(value).ok().and_then(|value| value.parse().ok()).unwrap_or(0));
            }
            is_coded |= name.trim_ascii().eq_ignore_ascii_case(b"transfer-encoding");
        }
        self.head.clear();
        (self.n_skipped, self.is_over) = (length.unwrap_or(0), is_coded);
        self.has_two_lengths = is_coded && length.is_some();
    }
}

/// A stream with a write timeout, so that a client that never reads cannot hold a connection.
struct TimeoutStream<S> {
    stream: S,
    most: Duration,
    /// Set while writes are blocked.
    waiting: Option<Pin<Box<Sleep>>>,
    /// Scans all input.
    heads: Arc<Mutex<HeadScanner>>,
    /// Notified when all output is flushed.
    entry: Arc<IdleEntry>,
}

impl<S: Unpin> TimeoutStream<S> {
    fn within<T>(
        &mut self,
        context: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let written = write(Pin::new(&mut self.stream), context);
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(self.most)));
        match waiting.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimeoutStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, into);
        if let Some(bytes) = into.filled().get(before..).filter(|bytes| !bytes.is_empty()) {
            self.heads.lock().unwrap_or_else(PoisonError::into_inner).read(bytes);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimeoutStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.within(context, |stream, context| stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.within(context, |stream, context| stream.poll_write_vectored(context, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = self.within(context, |stream, context| stream.poll_flush(context));
        if matches!(flushed, Poll::Ready(Ok(()))) {
            self.entry.flushed();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.within(context, |stream, context| stream.poll_shutdown(context))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Telemetry;
    use axum::body::{Body, Bytes};
    use hyper::body::Frame;
    use std::net::Ipv4Addr;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::net::TcpStream;

    const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn connections() -> Connections {
        Connections {
            limits: Limits::default(),
            metrics: Arc::new(Metrics::new(&Telemetry::default())),
            tls: None,
            sweep: Arc::new(|| ()),
        }
    }

    /// Yields until the condition holds.
    async fn until(is_so: impl Fn() -> bool) {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    }

    /// A complete answer is handed to the connection at once, and written while its client reads.
    #[tokio::test]
    async fn connection_counts_as_busy_until_its_answer_is_written() {
        // More than socket buffers hold.
        const LEN: usize = 32 << 20;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let connections = connections();
        let idle = Arc::new(IdleConnections::default());
        let entry = Arc::new(IdleEntry::new(&idle));
        let n_waiting = || idle.with(|waiting| waiting.connections.len());
        assert_eq!(n_waiting(), 1);
        let router = Router::new().fallback(async || Body::from(vec![0; LEN]));
        let graceful = GracefulShutdown::new();
        let watcher = graceful.watcher();
        let serving = tokio::spawn(async move { connections.serve(stream, LOOPBACK, router, watcher, &entry).await });

        client.writable().await.unwrap();
        let request = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n";
        assert_eq!(client.try_write(request).unwrap(), request.len());
        let mut n_read = 0;
        let mut piece = vec![0; 1 << 20];
        let head = loop {
            client.readable().await.unwrap();
            let Ok(n) = client.try_read(&mut piece) else { continue };
            // The server still has output to write.
            if n_read < LEN / 2 {
                assert_eq!(n_waiting(), 0, "after {n_read} bytes");
            }
            n_read += n;
            if n_read >= LEN {
                break n_read - LEN;
            }
        };
        assert!((50..500).contains(&head), "{head}");
        until(|| n_waiting() == 1).await;
        drop(client);
        serving.await.unwrap();
        assert_eq!(n_waiting(), 0);
    }

    /// A client that sends a request and then reads little.
    struct Stuck {
        request: &'static [u8],
        room: usize,
    }

    impl AsyncRead for Stuck {
        fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            let request = std::mem::take(&mut self.request);
            into.put_slice(request);
            if request.is_empty() { Poll::Pending } else { Poll::Ready(Ok(())) }
        }
    }

    impl AsyncWrite for Stuck {
        fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            let n = bytes.len().min(self.room);
            self.room -= n;
            if n == 0 { Poll::Pending } else { Poll::Ready(Ok(n)) }
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// An endless body that counts the bytes taken.
    struct Counted(Arc<AtomicUsize>);

    impl hyper::body::Body for Counted {
        type Data = Bytes;
        type Error = io::Error;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
            self.0.fetch_add(1 << 10, Ordering::Relaxed);
            Poll::Ready(Some(Ok(Frame::data(vec![0; 1 << 10].into()))))
        }
    }

    #[tokio::test]
    async fn unsent_bytes_of_an_answer_are_bounded() {
        let n_taken = Arc::new(AtomicUsize::new(0));
        let of_body = n_taken.clone();
        let router = Router::new().fallback(async move || Body::new(Counted(of_body.clone())));
        let entry = Arc::new(IdleEntry::new(&Arc::default()));
        let graceful = GracefulShutdown::new();
        let (connections, watcher) = (connections(), graceful.watcher());
        let stuck = Stuck { request: b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", room: 50_000 };
        let serving = tokio::spawn(async move { connections.serve(stuck, LOOPBACK, router, watcher, &entry).await });
        until(|| n_taken.load(Ordering::Relaxed) > 50_000).await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        let n_taken = n_taken.load(Ordering::Relaxed);
        assert!(n_taken <= 50_000 + MAX_UNSENT + (2 << 10), "{n_taken} bytes are taken");
        serving.abort();
    }

    /// However a head is split, and whatever precedes it.
    #[test]
    fn request_head_with_two_body_lengths_is_detected() {
        let parsed = |text: &str, n: usize| {
            let mut heads = HeadScanner::new(1000);
            text.as_bytes().chunks(n).for_each(|piece| heads.read(piece));
            (heads.has_two_lengths, heads.is_over)
        };
        let (length, coding) = ("Content-Length: 5\r\n", "transfer-encoding:chunked\r\n");
        for n in [1, 2, 7, 1000] {
            for (lines, two, over) in [
                (String::new(), false, false),
                (length.into(), false, false),
                (coding.into(), false, true),
                (format!("{length}{coding}"), true, true),
                (format!("{coding}a: b\r\n{length}"), true, true),
                (format!("x-content-length: 5\r\n{coding}"), false, true),
            ] {
                let head = format!("POST / HTTP/1.1\r\n{lines}\r\n");
                assert_eq!(parsed(&head, n), (two, over), "{head}");
                // A body may look like a head.
                let first = "POST / HTTP/1.1\r\ncontent-length: 10\r\n\r\n\r\n\r\na: b\r\n";
                assert_eq!(parsed(&format!("{first}\r\n{head}"), n), (two, over), "{head} after another");
            }
            assert!(parsed(&"a".repeat(2000), n).1);
        }
    }
}
