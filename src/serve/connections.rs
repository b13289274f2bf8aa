//! Connections: so many at a time, each with a limit on the time and the size of headers, with TLS or without.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener as StdListener;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
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
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{AcquireError, Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, MissedTickBehavior, Sleep, interval, sleep, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;

use super::limits::Limits;
use super::metrics::Metrics;
use crate::error::Error;

/// How often [`Connections::sweep`] is called.
const SWEEP: Duration = Duration::from_secs(1);

/// How long to wait where no connection can be taken, such as for want of file descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// How long a connection may wait for its client before it makes room for another: clients that are far away need as much.
const GRACE: Duration = Duration::from_millis(200);

/// TLS of connections.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl Tls {
    /// Reads certificates and their key.
    ///
    /// # Errors
    /// [`Error::Option`] naming the file that cannot be used.
    pub fn open(certificates: &Path, key: &Path) -> Result<Tls, Error> {
        let refused = |option, path: &Path, found: &dyn std::fmt::Display| Error::Option {
            option,
            expected: "a file in PEM".into(),
            found: format!("{}: {found}", path.display()),
        };
        let chain = CertificateDer::pem_file_iter(certificates)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|error| refused("tls_cert", certificates, &error))?;
        let own = PrivateKeyDer::from_pem_file(key).map_err(|error| refused("tls_key", key, &error))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.and_then(|config| config.with_no_client_auth().with_single_cert(chain, own));
        let mut config = config.map_err(|error| refused("tls_cert", certificates, &error))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Tls(TlsAcceptor::from(Arc::new(config))))
    }
}

/// What all connections have in common.
#[derive(Clone)]
pub struct Connections {
    pub limits: Limits,
    pub metrics: Arc<Metrics>,
    pub tls: Option<Tls>,
    /// Is called time and again, to look for models that nobody uses.
    pub sweep: Arc<dyn Fn() + Send + Sync>,
}

impl Connections {
    /// Takes connections until `end`, and then waits for those that are at work.
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
        // In one of the runtime's threads, which goes on with the connection that it took: from the caller's thread each one would
        // have to wake another.
        let accepting = tokio::spawn(self.accept(listener, router, stopped));
        end.await;
        let _ = stop.send(());
        let graceful = accepting.await.map_err(io::Error::other)?;
        sweeper.abort();
        let _ = timeout(drain, graceful.shutdown()).await;
        Ok(())
    }

    /// Takes connections until it is stopped. Gives what waits for them.
    async fn accept(
        self,
        listener: TcpListener,
        router: Router,
        mut stopped: oneshot::Receiver<()>,
    ) -> GracefulShutdown {
        let rooms = Arc::new(Semaphore::new(self.limits.connections));
        let idle = Arc::new(Idle::default());
        let graceful = GracefulShutdown::new();
        loop {
            // Where all are at work, one connection waits here and further ones in the system's own queue.
            let taken = async {
                let (stream, _) = listener.accept().await?;
                let room = tokio::select! {
                    biased;
                    room = rooms.clone().acquire_owned() => room,
                    room = idle.make_room(&rooms) => room,
                };
                Ok::<_, io::Error>((stream, room))
            };
            let taken = tokio::select! {
                taken = taken => taken,
                _ = &mut stopped => return graceful,
            };
            let Ok((stream, room)) = taken else {
                sleep(PAUSE).await;
                continue;
            };
            let (this, router, watcher) = (self.clone(), router.clone(), graceful.watcher());
            let place = Arc::new(Place::new(&idle));
            tokio::spawn(async move {
                let _room = room;
                let _connected = this.metrics.connected();
                // Tokens are small, and are to arrive one by one.
                let _ = stream.set_nodelay(true);
                let served = async {
                    match &this.tls {
                        None => this.serve(stream, router, watcher, &place).await,
                        Some(Tls(acceptor)) => {
                            if let Ok(Ok(stream)) = timeout(this.limits.header_time, acceptor.accept(stream)).await {
                                this.serve(stream, router, watcher, &place).await;
                            }
                        }
                    }
                };
                tokio::select! {
                    () = served => {}
                    () = place.turned_out.notified() => {}
                }
            });
        }
    }

    /// Serves a connection. What is wrong with it is its client's concern.
    async fn serve(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
        router: Router,
        watcher: Watcher,
        place: &Arc<Place>,
    ) {
        let limits = &self.limits;
        let service = TowerToHyperService::new(router);
        let service = service_fn(|mut request: Request<Incoming>| {
            request.extensions_mut().insert(Arc::new(AtWork::new(place)));
            service.call(request)
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header_time)
            .max_headers(limits.headers)
            .max_header_size(limits.header_bytes)
            .serve_connection(TokioIo::new(Impatient { stream, most: limits.write_time, waiting: None }), service);
        let _ = watcher.watch(connection).await;
    }
}

/// Connections that wait for their clients, those first that never had an answer, and then in the order in which they began to
/// wait. They make room for others, so that no number of clients that send nothing, or send it slowly, keeps others away.
#[derive(Default)]
struct Idle {
    waiting: Mutex<Waiting>,
    /// There is another one.
    more: Notify,
}

/// Whether it had an answer, and a number that grows.
type Number = (bool, u64);

#[derive(Default)]
struct Waiting {
    next: u64,
    connections: BTreeMap<Number, (Instant, Arc<Notify>)>,
}

impl Idle {
    fn with<T>(&self, work: impl FnOnce(&mut Waiting) -> T) -> T {
        work(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Turns out the connection that has waited longest, as soon as there is one, and has its room.
    async fn make_room(&self, rooms: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, AcquireError> {
        loop {
            let more = self.more.notified();
            let longest = self.with(|waiting| match waiting.connections.first_entry() {
                Some(first) if first.get().0.elapsed() >= GRACE => Some(Ok(first.remove().1)),
                first => first.map(|first| Err(first.get().0 + GRACE)),
            });
            match longest {
                Some(Ok(turned_out)) => break turned_out.notify_one(),
                Some(Err(until)) => sleep_until(until).await,
                None => more.await,
            }
        }
        rooms.clone().acquire_owned().await
    }
}

/// A connection's place among those that wait, where it is while no request is at work.
struct Place {
    idle: Arc<Idle>,
    /// Its number among them.
    number: Mutex<Option<Number>>,
    had_answer: AtomicBool,
    turned_out: Arc<Notify>,
}

impl Place {
    fn new(idle: &Arc<Idle>) -> Place {
        let place = Place {
            idle: idle.clone(),
            number: Mutex::default(),
            had_answer: AtomicBool::new(false),
            turned_out: Arc::default(),
        };
        place.wait();
        place
    }

    fn set(&self, waits: bool) {
        let mut number = self.number.lock().unwrap_or_else(PoisonError::into_inner);
        self.idle.with(|waiting| {
            if let Some(number) = number.take() {
                waiting.connections.remove(&number);
            }
            if waits {
                let own = (self.had_answer.load(Ordering::Relaxed), waiting.next);
                waiting.connections.insert(own, (Instant::now(), self.turned_out.clone()));
                *number = Some(own);
                waiting.next += 1;
            }
        });
    }

    fn wait(&self) {
        self.set(true);
        self.idle.more.notify_one();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// A request at work: its connection does not make room for others.
pub struct AtWork(Arc<Place>);

impl AtWork {
    fn new(place: &Arc<Place>) -> AtWork {
        place.set(false);
        AtWork(place.clone())
    }

    /// The request's body is awaited, until what this gives is dropped.
    pub fn awaits_body(self: Arc<Self>) -> AwaitsBody {
        self.0.wait();
        AwaitsBody(self)
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.had_answer.store(true, Ordering::Relaxed);
        self.0.wait();
    }
}

/// A body is awaited.
pub struct AwaitsBody(Arc<AtWork>);

impl Drop for AwaitsBody {
    fn drop(&mut self) {
        self.0.0.set(false);
    }
}

/// A stream whose other end has to read within some time, so that nobody holds a connection by reading nothing.
struct Impatient<S> {
    stream: S,
    most: Duration,
    /// Since there was no room.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S: Unpin> Impatient<S> {
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

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
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
        self.within(context, |stream, context| stream.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.within(context, |stream, context| stream.poll_shutdown(context))
    }
}
