//! A story from the built-in model.
//!
//! `cargo run --release --example generate`

use tilewright::{Device, Error, GenerateOptions, Model};

fn main() -> Result<(), Error> {
    pollster::block_on(async {
        let model = Model::builtin(&Device::auto().await)?; // or Model::load(&device, "model.gguf", Default::default())
        let mut session = model.session()?;
        let prompt = "Once upon a time";
        let mut generation = session.generate(prompt, &GenerateOptions::default())?;
        print!("{prompt}");
        while let Some(piece) = generation.next().await {
            print!("{}", piece?.text);
        }
        println!();
        Ok(())
    })
}
