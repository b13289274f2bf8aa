//! Differences between browsers and other platforms.

/// `Send`, except in a browser, where a device stays on its thread.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) trait MaybeSend: Send {}
#[cfg(not(target_arch = "wasm32"))]
impl<T: Send> MaybeSend for T {}
#[cfg(target_arch = "wasm32")]
pub(crate) trait MaybeSend {}
#[cfg(target_arch = "wasm32")]
impl<T> MaybeSend for T {}

/// Runs a future to completion on a new thread, which may block.
///
/// # Errors
/// If the system cannot create a thread.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn spawn(
    name: &str,
    work: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(|| pollster::block_on(work))
}

/// Yields to a browser's event loop during long work; does nothing elsewhere.
pub(crate) async fn pause() {
    #[cfg(target_arch = "wasm32")]
    next_turn().await;
}

#[cfg(target_arch = "wasm32")]
async fn next_turn() {
    use wasm_bindgen::JsCast;

    // Windows, Node and Deno are not workers, but have this method as well.
    let scope = js_sys::global().unchecked_into::<web_sys::WorkerGlobalScope>();
    let promise = js_sys::Promise::new(&mut |resolve, _| {
        // It can only fail for a callback given as a string.
        let _ = scope.set_timeout_with_callback_and_timeout_and_arguments_0(&resolve, 0);
    });
    // The promise is never rejected.
    let _ = wasm_bindgen_futures::JsFuture::from(promise).await;
}
