//! Connections: so many at a time, each with a limit on the time and the size of headers, with TLS or without.

use std::io;
use std::net::TcpListener as StdListener;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, Sleep, interval, sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::limits::Limits;
use super::metrics::Metrics;
use crate::error::Error;

/// How often [`Connections::sweep`] is called.
const SWEEP: Duration = Duration::from_secs(1);

/// How long to wait where no connection can be taken, such as for want of file descriptors.
const PAUSE: Duration = Duration::from_millis(50);

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
        let rooms = Arc::new(Semaphore::new(self.limits.connections));
        let graceful = GracefulShutdown::new();
        let sweep = self.sweep.clone();
        let sweeper = tokio::spawn(async move {
            let mut clock = interval(SWEEP);
            clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                clock.tick().await;
                sweep();
            }
        });
        let mut end = std::pin::pin!(end);
        loop {
            // Without room for another one, connections wait in the system's own queue.
            let taken = async {
                let room = rooms.clone().acquire_owned().await;
                (room, listener.accept().await)
            };
            let (room, accepted) = tokio::select! {
                taken = taken => taken,
                () = &mut end => break,
            };
            let Ok((stream, _)) = accepted else {
                sleep(PAUSE).await;
                continue;
            };
            let (this, router, watcher) = (self.clone(), router.clone(), graceful.watcher());
            tokio::spawn(async move {
                let _room = room;
                let _connected = this.metrics.connected();
                // Tokens are small, and are to arrive one by one.
                let _ = stream.set_nodelay(true);
                match &this.tls {
                    None => this.serve(stream, router, watcher).await,
                    Some(Tls(acceptor)) => {
                        if let Ok(Ok(stream)) = timeout(this.limits.header_time, acceptor.accept(stream)).await {
                            this.serve(stream, router, watcher).await;
                        }
                    }
                }
            });
        }
        drop(listener);
        sweeper.abort();
        let _ = timeout(self.limits.drain, graceful.shutdown()).await;
        Ok(())
    }

    /// Serves a connection. What is wrong with it is its client's concern.
    async fn serve(&self, stream: impl AsyncRead + AsyncWrite + Unpin + 'static, router: Router, watcher: Watcher) {
        let limits = &self.limits;
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header_time)
            .max_headers(limits.headers)
            .max_header_size(limits.header_bytes)
            .serve_connection(
                TokioIo::new(Impatient { stream, most: limits.write_time, waiting: None }),
                TowerToHyperService::new(router),
            );
        let _ = watcher.watch(connection).await;
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
