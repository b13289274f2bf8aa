//! Embeddings in a Tokio program: futures of an embedder compute in `poll` on the CPU, so they run on a blocking thread.
//!
//! `cargo run --release -p tilewright-serve --example tokio_embed -- all-MiniLM-L6-v2 "a quiet river" "a calm stream"`

use tilewright::{Device, EmbedOptions, Embedder};

/// Embeddings `[texts, dims]`, normalised as the model says. Clones of an embedder share the model.
async fn embed(embedder: &Embedder, texts: Vec<String>) -> Result<Vec<Vec<f32>>, Box<dyn std::error::Error>> {
    let (embedder, dims) = (embedder.clone(), embedder.dims() as usize);
    let work = tokio::task::spawn_blocking(move || pollster::block_on(embedder.embed(&texts)));
    Ok(work.await??.chunks(dims).map(<[f32]>::to_vec).collect())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("expected a model folder or file, then texts")?;
    // Loading blocks as well.
    let device = Device::auto().await;
    let load = tokio::task::spawn_blocking(move || Embedder::load(&device, &path, EmbedOptions::default()));
    let embedder = load.await??;
    let vectors = embed(&embedder, args.collect()).await?;
    for (at, vector) in vectors.iter().enumerate() {
        // Cosine similarity to the first text.
        let cosine: f32 = vectors[0].iter().zip(vector).map(|(a, b)| a * b).sum();
        println!("{at}: {cosine:.4}");
    }
    Ok(())
}
