//! Ranks texts by similarity to the first: `cargo run --release --example embed -- FOLDER TEXT TEXT ...`

use tilewright::{Device, EmbedOptions, Embedder, Error};

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let Some(model) = args.next() else {
        println!("usage: embed FOLDER [TEXT ...], with a folder such as all-MiniLM-L6-v2 from Hugging Face");
        return Ok(());
    };
    let mut texts: Vec<String> = args.collect();
    if texts.is_empty() {
        texts = ["a quiet river", "a calm stream", "the bank of a river", "a bank account", "tax law"]
            .map(Into::into)
            .into();
    }
    pollster::block_on(async {
        let device = Device::auto().await;
        let embedder = Embedder::load(&device, &model, EmbedOptions::default())?;
        let vectors = embedder.embed(&texts).await?; // [n, C]
        let rows: Vec<&[f32]> = vectors.chunks_exact(embedder.dims() as usize).collect();
        for (text, row) in texts.iter().zip(&rows) {
            let cosine: f32 = row.iter().zip(rows[0]).map(|(a, b)| a * b).sum();
            println!("{cosine:.3}  {text}");
        }
        Ok(())
    })
}
