//! Biases of attention scores by relative position.

use super::config::config_error;
use crate::error::Error;

/// Learned biases of each head's scores by the distance from query to key, in buckets (Raffel et al. 2019,
/// arXiv:1910.10683). All layers share them: T5's encoder, MPNet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionBiases {
    /// Buckets of both sides together: `attention.relative_buckets_count`; `relative_attention_num_buckets`.
    pub n_buckets: u32,
    /// Distance from which on all keys of a side share its last bucket: `relative_attention_max_distance`.
    pub max_distance: u32,
}

impl PositionBiases {
    /// Rows of a table with a row for each distance from `-max_distance` to `max_distance`.
    pub(crate) fn n_distances(self) -> u32 {
        2 * self.max_distance + 1
    }

    /// The bucket of each row of that table: exact ones for half of a side's buckets, then logarithmic ones.
    pub(crate) fn buckets(self) -> impl Iterator<Item = u32> {
        let of_side = self.n_buckets / 2;
        let n_exact = of_side / 2;
        // In f32, as the models were trained.
        let log_range = (self.max_distance as f32 / n_exact as f32).ln();
        let of_distance = move |distance: u32| {
            let log = (distance as f32 / n_exact as f32).ln() / log_range;
            let far = n_exact + (log * (of_side - n_exact) as f32) as u32;
            if distance < n_exact { distance } else { far.min(of_side - 1) }
        };
        // Keys before the query have the first half.
        let before = (1..=self.max_distance).rev().map(of_distance);
        before.chain([0]).chain((1..=self.max_distance).map(move |distance| of_side + of_distance(distance)))
    }

    /// # Errors
    /// [`Error::Config`] naming the number that is out of range.
    pub(super) fn check(self) -> Result<(), Error> {
        const MOST: u32 = 1 << 12;
        let PositionBiases { n_buckets, max_distance } = self;
        if !(4..=MOST).contains(&n_buckets) || !n_buckets.is_multiple_of(4) {
            let field = "attention.relative_buckets_count (relative_attention_num_buckets)";
            return Err(config_error(field, format!("a multiple of 4 up to {MOST}"), n_buckets));
        }
        if !(n_buckets / 4 + 1..=MOST).contains(&max_distance) {
            let expected = format!("{} to {MOST}", n_buckets / 4 + 1);
            return Err(config_error("relative_attention_max_distance", expected, max_distance));
        }
        Ok(())
    }
}
