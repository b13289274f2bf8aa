//! What computes: admits requests, runs passes, tells streams.

use std::sync::Arc;

use web_time::Instant;

use super::options::EngineOptions;
use super::queue::{Shared, Waiting};
use crate::error::Error;
use crate::generate::{Model, StopReason};

/// Computes the requests of an [`Engine`](super::Engine).
pub struct Driver {
    model: Model,
    shared: Arc<Shared>,
}

impl Driver {
    pub(super) fn new(model: &Model, _options: &EngineOptions, shared: Arc<Shared>) -> Result<Driver, Error> {
        Ok(Driver { model: model.clone(), shared })
    }

    /// Computes until no request comes any more.
    pub async fn run(&mut self) {
        while self.shared.wait().await {
            if let Some(waiting) = self.shared.take() {
                self.serve(waiting).await;
            }
        }
    }

    async fn serve(&mut self, Waiting { request, teller }: Waiting) {
        self.shared.update(0, |stats| stats.n_running = 1);
        teller.begin(request.ids.len(), 0);
        let ended = async {
            let mut session = self.model.session()?;
            let mut generation = session.generate_ids(&request.ids, &request.options)?;
            while let Some(piece) = generation.next().await {
                teller.piece(piece?);
                if request.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return Ok(StopReason::Deadline);
                }
                if teller.is_cancelled() {
                    generation.cancel();
                }
            }
            Ok(generation.stop_reason().unwrap_or(StopReason::Cancelled))
        }
        .await;
        self.shared.update(1, |stats| {
            stats.n_running = 0;
            match &ended {
                Ok(StopReason::Cancelled | StopReason::Deadline) => stats.n_cancelled += 1,
                Ok(_) => stats.n_finished += 1,
                Err(_) => stats.n_failed += 1,
            }
        });
        match ended {
            Ok(reason) => teller.end(reason),
            Err(error) => teller.fail(error),
        }
    }
}
