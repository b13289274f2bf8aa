//! A conversation with the built-in model, which was trained on stories only.
//!
//! `cargo run --release --example chat`

use tilewright::answer::Event;
use tilewright::chat::{ChatTemplate, Message};
use tilewright::{ChatModel, ChatRequest, Device, Error, Model};

fn main() -> Result<(), Error> {
    pollster::block_on(async {
        let model = Model::builtin(&Device::auto().await)?;
        // The built-in model has no template. With one: `ChatModel::new(&model)?`.
        let chat = ChatModel::of(&model, ChatTemplate::known("alpaca"))?;
        let mut session = model.session()?;
        let mut request = ChatRequest::new(vec![Message::new("user", "Tell me about a dragon.")]);
        let answer = chat.answer(&mut session, &request).await?; // text, thinking, calls, stop_reason
        println!("{}", answer.text);

        request.push(answer);
        request.messages.push(Message::new("user", "And then?"));
        let mut stream = chat.stream(&mut session, &request)?;
        while let Some(event) = stream.next().await {
            match event? {
                Event::Text(text) => print!("{text}"),
                Event::Call(call) => println!("{} is called with {:?}", call.name, call.arguments),
                _ => {}
            }
        }
        println!();
        Ok(())
    })
}
