//! Zero-sized stubs for `telemetry.rs` in builds without that feature.

use std::time::Duration;

use axum::extract::Request;
use prometheus_client::registry::Registry;
use tilewright::engine::Usage;

#[derive(Clone, Default)]
pub struct Telemetry;

impl Telemetry {
    pub fn request(&self, _: &Request, _: Option<&str>) -> ServerSpan {
        ServerSpan
    }

    pub fn register(&self, _: &mut Registry) {}

    pub async fn end(self) {}
}

pub struct ServerSpan;

impl ServerSpan {
    pub fn trace(&self) -> TraceContext {
        TraceContext
    }

    pub fn answered(&self, _: u16, _: Option<&'static str>) {}

    pub fn gone(&self) {}
}

#[derive(Clone, Default)]
pub struct TraceContext;

impl TraceContext {
    pub fn operation(&self, _: &str, _: usize) -> Operation {
        Operation
    }
}

pub struct Operation;

impl Operation {
    pub fn queued(&self, _: usize) -> Stages {
        Stages
    }

    pub fn first_token(&self, _: Duration) {}

    pub fn finished(&mut self, _: usize, _: &'static str) {}

    pub fn used(&self, _: impl FnOnce() -> Usage) {}

    pub fn done(&mut self) {}

    pub fn failed(&mut self, _: &'static str) {}
}

pub struct Stages;

impl Stages {
    pub fn look(&mut self, _: impl FnOnce() -> Usage) {}

    pub fn first_token(&mut self, _: Usage) {}

    pub fn end(&mut self, _: Usage, _: Option<&'static str>) {}
}
