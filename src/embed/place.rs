//! Splits an encoder's batches between two devices: each batch size runs on the faster one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use web_time::Instant;

use super::batch::{EncoderPasses, Tokens, size_of};
use crate::error::Error;
use crate::model::{BatchSize, ModelConfig};
use crate::target::PlaceKey;
use crate::target::Tuning;

/// The device that runs batches of one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// Tokens in the batch, rounded up to a recorded size.
    pub n_tokens: u32,
    /// Texts in the batch, rounded up likewise.
    pub n_texts: u32,
    /// Whether the second device runs these batches.
    pub is_second: bool,
    /// Seconds per batch on the first and the second device, if measured since loading.
    pub seconds: Option<[f64; 2]>,
}

/// The second device's passes and the measured sizes.
pub(super) struct Second {
    passes: Arc<EncoderPasses>,
    places: Mutex<BTreeMap<[u32; 2], Place>>,
}

impl Second {
    pub fn new(passes: Arc<EncoderPasses>) -> Second {
        Second { passes, places: Mutex::default() }
    }

    /// The passes that should run this batch, if its size was measured before.
    pub fn passes_for<'a>(&'a self, first: &'a EncoderPasses, texts: &[&Tokens]) -> Option<&'a EncoderPasses> {
        let place = self.known(first, size_of(texts))?;
        Some(self.passes_at(first, place))
    }

    /// Measures this batch on both devices and returns the faster one's passes. `first` must have nothing in flight.
    pub async fn measure<'a>(
        &'a self,
        first: &'a EncoderPasses,
        texts: &[&Tokens],
    ) -> Result<&'a EncoderPasses, Error> {
        let BatchSize { n_tokens, n_sequences: n_texts } = size_of(texts);
        let seconds = [seconds(first, texts).await?, seconds(&self.passes, texts).await?];
        let place = Place { n_tokens, n_texts, is_second: seconds[1] < seconds[0], seconds: Some(seconds) };
        self.places().insert([n_tokens, n_texts], place);
        Ok(self.passes_at(first, place))
    }

    fn passes_at<'a>(&'a self, first: &'a EncoderPasses, place: Place) -> &'a EncoderPasses {
        if place.is_second { &self.passes } else { first }
    }

    /// The measured place, or the one in the first device's tuning.
    fn known(&self, first: &EncoderPasses, size: BatchSize) -> Option<Place> {
        let BatchSize { n_tokens, n_sequences: n_texts } = size;
        if let Some(&place) = self.places().get(&[n_tokens, n_texts]) {
            return Some(place);
        }
        let is_second = first.device().tuning().place(&self.key(first, size))?;
        let place = Place { n_tokens, n_texts, is_second, seconds: None };
        self.places().insert([n_tokens, n_texts], place);
        Some(place)
    }

    fn key(&self, first: &EncoderPasses, size: BatchSize) -> PlaceKey {
        let ModelConfig { architecture, blocks, dim, .. } = &first.encoder().config;
        let (n_layers, ffn_dim) = (blocks.len(), blocks.first().map_or(0, |block| block.feed_forward.dim));
        PlaceKey {
            encoder: format!("{architecture} {n_layers} x {dim}, {ffn_dim}"),
            second: self.passes.device().info().name.clone(),
            n_tokens: size.n_tokens,
            n_texts: size.n_sequences,
        }
    }

    /// All places so far, by size.
    pub fn all(&self) -> Vec<Place> {
        self.places().values().copied().collect()
    }

    /// The first device's tuning, including these places.
    pub fn tuning(&self, first: &EncoderPasses) -> Tuning {
        let mut tuning = first.device().tuning().clone();
        for place in self.all() {
            let size = BatchSize { n_tokens: place.n_tokens, n_sequences: place.n_texts };
            tuning.put(self.key(first, size), place.is_second);
        }
        tuning
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<[u32; 2], Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Seconds per batch: the shorter of two runs, after a warm-up run.
async fn seconds(passes: &EncoderPasses, texts: &[&Tokens]) -> Result<f64, Error> {
    passes.test(texts).await?;
    passes.run(texts)?.await?;
    let mut shortest = f64::INFINITY;
    for _ in 0..2 {
        let start = Instant::now();
        passes.run(texts)?.await?;
        shortest = shortest.min(start.elapsed().as_secs_f64());
    }
    Ok(shortest)
}
