//! KV cache and recurrent states on a device.

use std::ops::Range;

use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{CachedKeys, KvType, N_STATES, PAGE};
use crate::model::{Block, ModelConfig, Recurrence};
use crate::tensor::{Role, Tensor};

/// Cache of all layers for up to `capacity` positions. The session knows which positions are valid: truncating and
/// clearing only move its position.
#[derive(Clone, Debug)]
pub struct KvCache {
    kept: Vec<LayerCache>,
    /// First layer.
    first: usize,
    /// Indices into `kept` for each layer, from the first one.
    of: Vec<OfLayer>,
    capacity: u32,
    ring: Option<Ring>,
}

/// Which caches a layer uses.
#[derive(Clone, Copy, Debug, Default)]
struct OfLayer {
    keys: Option<usize>,
    states: Option<usize>,
    /// Whether its keys are in the pages of windows.
    in_window_pages: bool,
}

/// Ring buffer of sliding-window layers: later positions reuse the slots of earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Minimum number of positions kept by these layers.
    pub slots: u32,
    /// How far before the last written position a pass can start.
    pub back: u32,
}

/// Minimum distance a sequence can go back without recomputation, for discarded tokens that ran ahead.
const LEAST_BACK: u32 = 16;

/// A layer's cache.
#[derive(Clone, Debug)]
pub enum LayerCache {
    /// Keys and values of all positions.
    Keys(CachedKeys),
    /// Recurrent states, used in rotation.
    State {
        /// Inputs of the convolution, `[N_STATES, taps - 1, channels]`; in a shared cache, as many per sequence as
        /// [`StepState::with_states`](crate::kernels::StepState::with_states) says.
        past: Tensor,
        /// State matrices per head, `[N_STATES, H, Dk, Dv]`, if any.
        matrices: Option<Tensor>,
    },
}

impl LayerCache {
    /// Declares keys and values of layer `l`, of this many slots and positions.
    fn declare_keys(
        (l, block): (usize, &Block),
        kind: KvType,
        [slots, capacity]: [u32; 2],
    ) -> Result<LayerCache, Error> {
        let shape = [block.attention.n_kv_heads, slots, block.attention.head_dim];
        let declare = match block.attention.latent {
            Some(_) => CachedKeys::declare_latent,
            None => CachedKeys::declare,
        };
        Ok(LayerCache::Keys(declare(&format!("cache.{l}"), kind, shape, capacity)?))
    }

    /// Declares this many states of layer `l`.
    fn declare_states(
        config: &ModelConfig,
        l: usize,
        recurrence: &Recurrence,
        n_states: u32,
    ) -> Result<LayerCache, Error> {
        let declare =
            |name: &str, shape: &[u32]| Tensor::declare(format!("cache.{l}.{name}"), Role::Cache, shape, DType::F32);
        Ok(LayerCache::State {
            past: declare("past", &[n_states, recurrence.taps() - 1, recurrence.channels(config.dim)])?,
            matrices: match recurrence.matrices() {
                Some([n_heads, rows, cols]) => Some(declare("state", &[n_states, n_heads, rows, cols])?),
                None => None,
            },
        })
    }

    /// Keys and values, or states.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let (first, second) = match self {
            LayerCache::Keys(CachedKeys { k, v, .. }) => (k, v.as_ref()),
            LayerCache::State { past, matrices } => (past, matrices.as_ref()),
        };
        std::iter::once(first).chain(second)
    }
}

impl KvCache {
    /// Declares a cache with keys and values of type `kind`, for passes of up to `max_pass` tokens.
    ///
    /// # Errors
    /// [`Error::Operand`] if `capacity` is zero or too large for one tensor.
    pub fn declare(config: &ModelConfig, kind: KvType, capacity: u32, max_pass: u32) -> Result<KvCache, Error> {
        KvCache::declare_part(config, 0..config.n_layers(), kind, capacity, max_pass)
    }

    /// As [`KvCache::declare`], for some layers, none of which shares the keys of a layer before them.
    ///
    /// # Errors
    /// As [`KvCache::declare`].
    pub fn declare_part(
        config: &ModelConfig,
        layers: Range<u32>,
        kind: KvType,
        capacity: u32,
        max_pass: u32,
    ) -> Result<KvCache, Error> {
        let back = max_pass.max(LEAST_BACK);
        // The pass, padding included, and what its first token sees.
        let slots_of = |block: &Block| match block.attention.window {
            Some(window) => capacity.min((window - 1).saturating_add(back)),
            None => capacity,
        };
        let with_keys = config.blocks.iter().filter(|block| block.attends());
        let slots = with_keys.map(slots_of).min().filter(|&slots| slots < capacity);
        // The minimum over all layers, since they follow one sequence.
        let ring = slots.map(|slots| Ring { slots, back });
        KvCache::of_layers(config, layers, (capacity, ring), N_STATES, |(l, block)| {
            Ok((LayerCache::declare_keys((l, block), kind, [slots_of(block), capacity])?, false))
        })
    }

    /// Declares a shared cache for some layers: `n_pages` pages of [`PAGE`] positions, page 0 being padding, and
    /// states in `n_slots` slots, one or several per sequence. A sequence has up to `capacity` positions, a multiple
    /// of a page. With `n_window_pages`, layers with a window have so many pages of their own.
    ///
    /// # Errors
    /// As [`KvCache::declare`].
    pub fn declare_shared(
        config: &ModelConfig,
        layers: Range<u32>,
        kind: KvType,
        [n_pages, n_slots, capacity]: [u32; 3],
        n_window_pages: Option<u32>,
    ) -> Result<KvCache, Error> {
        KvCache::of_layers(config, layers, (capacity, None), n_slots, |(l, block)| {
            let own_pages = n_window_pages.filter(|_| block.attention.window.is_some());
            let slots = own_pages.unwrap_or(n_pages).saturating_mul(PAGE);
            Ok((LayerCache::declare_keys((l, block), kind, [slots, capacity])?, own_pages.is_some()))
        })
    }

    /// Declares states of each recurrent layer, and by `keys` the keys of each layer that does not share an earlier
    /// one's, and whether they are in the pages of windows.
    fn of_layers(
        config: &ModelConfig,
        layers: Range<u32>,
        (capacity, ring): (u32, Option<Ring>),
        n_states: u32,
        keys: impl Fn((usize, &Block)) -> Result<(LayerCache, bool), Error>,
    ) -> Result<KvCache, Error> {
        let first = layers.start as usize;
        let (mut kept, mut of) = (Vec::new(), Vec::<OfLayer>::new());
        for (l, block) in config.blocks.iter().enumerate().take(layers.end as usize).skip(first) {
            let mut own = OfLayer::default();
            if block.attends() {
                let earlier = block.attention.keys_of.and_then(|earlier| earlier.checked_sub(first));
                match earlier.and_then(|earlier| of.get(earlier)).filter(|earlier| earlier.keys.is_some()) {
                    Some(earlier) => own = OfLayer { states: None, ..*earlier },
                    None => {
                        own.keys = Some(kept.len());
                        let (declared, in_window_pages) = keys((l, block))?;
                        own.in_window_pages = in_window_pages;
                        kept.push(declared);
                    }
                }
            }
            if let Some(recurrence) = block.recurs() {
                own.states = Some(kept.len());
                kept.push(LayerCache::declare_states(config, l, recurrence, n_states)?);
            }
            of.push(own);
        }
        Ok(KvCache { kept, first, of, capacity, ring })
    }

    /// The ring of the sliding-window layers, if any.
    pub fn ring(&self) -> Option<Ring> {
        self.ring
    }

    /// Maximum number of positions.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// A layer's keys and values, or those of the layer whose keys it shares; `None` without attention.
    pub fn keys(&self, layer_idx: usize) -> Option<&CachedKeys> {
        match self.kept.get(self.of.get(layer_idx.checked_sub(self.first)?)?.keys?)? {
            LayerCache::Keys(cached) => Some(cached),
            LayerCache::State { .. } => None,
        }
    }

    /// Whether a layer's keys are in the pages of windows.
    pub fn is_in_window_pages(&self, layer_idx: usize) -> bool {
        let of = layer_idx.checked_sub(self.first).and_then(|at| self.of.get(at));
        of.is_some_and(|of| of.in_window_pages)
    }

    /// A recurrent layer's past inputs and state matrices.
    pub fn states_of(&self, layer_idx: usize) -> Option<(&Tensor, Option<&Tensor>)> {
        match self.kept.get(self.of.get(layer_idx.checked_sub(self.first)?)?.states?)? {
            LayerCache::State { past, matrices } => Some((past, matrices.as_ref())),
            LayerCache::Keys(_) => None,
        }
    }

    /// Caches with the numbers of the layers that write them.
    pub fn kept(&self) -> impl Iterator<Item = (usize, &LayerCache)> {
        let uses = |of: &OfLayer, i| of.keys == Some(i) || of.states == Some(i);
        let writer = move |i: usize| self.first + self.of.iter().position(|of| uses(of, i)).unwrap_or(i);
        self.kept.iter().enumerate().map(move |(i, layer)| (writer(i), layer))
    }

    /// Tensors of recurrent states.
    pub(crate) fn states(&self) -> impl Iterator<Item = &Tensor> {
        self.kept.iter().filter(|layer| matches!(layer, LayerCache::State { .. })).flat_map(LayerCache::tensors)
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.kept.iter().flat_map(LayerCache::tensors)
    }

    /// Declares another cache of the same shape.
    ///
    /// # Errors
    /// As [`KvCache::declare`].
    pub fn declare_like(&self) -> Result<KvCache, Error> {
        let like = |tensor: &Tensor| Tensor::declare(tensor.label(), Role::Cache, tensor.shape(), tensor.dtype());
        let layer = |layer: &LayerCache| {
            Ok(match layer {
                LayerCache::Keys(cached) => {
                    let v = cached.v.as_ref().map(like).transpose()?;
                    LayerCache::Keys(CachedKeys { k: like(&cached.k)?, v, ..cached.clone() })
                }
                LayerCache::State { past, matrices } => {
                    LayerCache::State { past: like(past)?, matrices: matrices.as_ref().map(like).transpose()? }
                }
            })
        };
        let kept = self.kept.iter().map(layer).collect::<Result<_, Error>>()?;
        Ok(KvCache { kept, of: self.of.clone(), ..*self })
    }

    /// Sources in another cache of the same model and destinations in this one, for a copy of its contents.
    pub fn copies_of<'a>(&'a self, other: &'a KvCache) -> Vec<(&'a Tensor, &'a Tensor)> {
        other.tensors().zip(self.tensors()).collect()
    }
}
