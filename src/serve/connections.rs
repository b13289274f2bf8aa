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
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, Sleep, interval, sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::app::App;
use crate::error::Error;

/// How often it is looked for models that nobody uses.
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

/// Takes connections until `end`, and then waits for those that are at work.
pub async fn run(
    app: &Arc<App>,
    listener: StdListener,
    tls: Option<Tls>,
    router: Router,
    end: impl Future<Output = ()>,
) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let rooms = Arc::new(Semaphore::new(app.limits.connections));
    let graceful = GracefulShutdown::new();
    let sweeping = app.clone();
    let sweeper = tokio::spawn(async move {
        let mut clock = interval(SWEEP);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            clock.tick().await;
            sweeping.models.sweep();
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
        // Tokens are small, and are to arrive one by one.
        let _ = stream.set_nodelay(true);
        let (app, tls, router, watcher) = (app.clone(), tls.clone(), router.clone(), graceful.watcher());
        tokio::spawn(async move {
            let _room = room;
            let _connected = app.metrics.connected();
            match tls {
                None => serve(&app, stream, router, watcher).await,
                Some(Tls(acceptor)) => {
                    if let Ok(Ok(stream)) = timeout(app.limits.header_time, acceptor.accept(stream)).await {
                        serve(&app, stream, router, watcher).await;
                    }
                }
            }
        });
    }
    drop(listener);
    sweeper.abort();
    let _ = timeout(app.limits.drain, graceful.shutdown()).await;
    Ok(())
}

/// Serves a connection. What is wrong with it is its client's concern.
async fn serve(
    app: &App,
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    router: Router,
    watcher: hyper_util::server::graceful::Watcher,
) {
    let limits = &app.limits;
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
