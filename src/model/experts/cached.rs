//! Expert cache of a layer: slots on the device for some experts, with matrices as for a layer with that many
//! experts. The host assigns experts to slots and replaces the numbers that `route` chose.

use super::{ExpertMatrix, ExpertWeights, Matrices, Tensors, routed};
use crate::dtype::DType;
use crate::error::Error;
use crate::matrix::Matrix;
use crate::model::block::Experts;
use crate::model::stack::{RowPlaces, TensorSlot, WeightSource};
use crate::target::Target;
use crate::tensor::{Role, Tensor, WordCopy};

/// Expert slots of a layer; the last ones hold the shared experts permanently.
#[derive(Clone, Debug)]
pub(crate) struct CachedExperts {
    n_experts: u32,
    n_slots: u32,
    n_shared: u32,
    /// Maximum number of tokens whose experts always fit the slots.
    most_tokens: u32,
    matrices: Matrices,
    /// Matrices of all experts, filled for passes over many tokens.
    all: Matrices,
    biases: [Option<Tensor>; 2],
    /// Tensors of all experts' biases and the position of their first element: of gates and ups, and of downs.
    bias_members: [Vec<(String, RowPlaces)>; 2],
    /// Tensors of all experts together, or of each.
    tensors: Vec<Tensors>,
    /// C and F.
    dims: [u32; 2],
}

/// A part of an expert: a file's tensor and its destination in a slot.
pub(crate) struct ExpertPart {
    pub name: String,
    /// Which of how many experts in the tensor; `None` if it has one.
    pub share: Option<[u32; 2]>,
    pub place: TensorSlot,
}

impl ExpertWeights {
    /// Whether experts can share slots: all routed ones have the same types and none shares a word of memory with
    /// its neighbour.
    pub(crate) fn can_be_cached(&self, n_experts: u32) -> bool {
        self.matrices.parts().all(|part| {
            let is_apart = part.first_expert == 0 || part.first_expert >= n_experts;
            is_apart && part.matrix.are_apart(part.rows)
        })
    }

    /// Bytes of an expert slot, and of everything else: the shared experts, and the maximum rounding of tensors.
    pub(crate) fn slot_bytes(&self, n_experts: u32) -> [u64; 2] {
        /// See [`Tensor::declare`].
        const ROUNDED: u64 = 16;
        let of_parts = self.matrices.parts().map(|ExpertMatrix { first_expert, rows, matrix, .. }| {
            let of_each = matrix.bytes_of(*rows);
            let n_shared = (first_expert + matrix.rows() / rows).saturating_sub(n_experts.max(*first_expert));
            let slot = if *first_expert < n_experts { of_each } else { 0 };
            [slot, u64::from(n_shared) * of_each + ROUNDED * matrix.n_slabs() as u64]
        });
        let of_biases = self.biases().into_iter().flatten();
        let of_biases = of_biases.map(|bias| [bias.len() as u64 * 4 / u64::from(n_experts.max(1)), ROUNDED]);
        of_parts.chain(of_biases).fold([0; 2], |[slots, beside], [slot, more]| [slots + slot, beside + more])
    }

    /// Declares slots for some of the experts that [`ExpertWeights::declare`] declared with this `prefix`, for
    /// passes of up to `most_tokens` tokens.
    pub(in crate::model) fn keep(
        &mut self,
        target: &Target,
        source: &dyn WeightSource,
        prefix: &str,
        (experts, dims, is_gated): (&Experts, [u32; 2], bool),
        [n_slots, most_tokens]: [u32; 2],
    ) -> Result<(), Error> {
        let tensors = routed(source, prefix, experts.n, dims, is_gated);
        let n_slots = n_slots.min(experts.n);
        // All experts have the same types, so the first ones stand for all.
        let mut in_slots: Vec<Tensors> = match &tensors[..] {
            [all] => vec![Tensors { n: n_slots, ..all.clone() }],
            each => each.iter().take(n_slots as usize).cloned().collect(),
        };
        in_slots.extend(experts.shared.as_ref().map(|of| super::cut(prefix, of, dims, is_gated)));
        let mut matrices = Matrices::declare(target, source, &in_slots, dims)?;
        // Tuning measured the matrices of all experts.
        let all = &self.matrices;
        for (part, all) in matrices.up.iter_mut().map(|up| &mut up.part).zip(all.up.iter().map(|up| &up.part)) {
            part.matrix = part.matrix.clone().tuned_as(&all.matrix);
        }
        for (part, all) in matrices.down.iter_mut().zip(&all.down) {
            part.matrix = part.matrix.clone().tuned_as(&all.matrix);
        }
        let bias = |of_all: &Option<super::Joined>| match of_all {
            Some(of_all) => {
                let len = of_all.tensor().len() as u32 / experts.n * n_slots;
                Tensor::declare("kept biases", Role::Weights, &[len], DType::F32).map(Some)
            }
            None => Ok(None),
        };
        let members = |of_all: &Option<super::Joined>| {
            let of_all = of_all.iter().flat_map(super::Joined::tensor_slots);
            let values = of_all.filter_map(|(name, place)| match place {
                TensorSlot::Values { places, .. } => Some((name.to_owned(), places)),
                TensorSlot::Rows { .. } => None,
            });
            values.collect::<Vec<_>>()
        };
        self.kept = Some(CachedExperts {
            n_experts: experts.n,
            n_slots,
            n_shared: self.shared.n,
            most_tokens,
            matrices,
            all: self.matrices.clone(),
            biases: [bias(&self.up_bias)?, bias(&self.down_bias)?],
            bias_members: [members(&self.up_bias), members(&self.down_bias)],
            tensors,
            dims,
        });
        Ok(())
    }

    /// The expert cache, if declared.
    pub(crate) fn kept(&self) -> Option<&CachedExperts> {
        self.kept.as_ref()
    }
}

impl CachedExperts {
    /// Whether the experts of this many tokens always fit the slots.
    pub(super) fn suffices(&self, n_tokens: u32) -> bool {
        n_tokens <= self.most_tokens
    }

    pub(super) fn matrices(&self) -> &Matrices {
        &self.matrices
    }

    pub(super) fn biases(&self) -> [Option<&Tensor>; 2] {
        self.biases.each_ref().map(Option::as_ref)
    }

    /// E: number of routed experts.
    pub fn n_experts(&self) -> u32 {
        self.n_experts
    }

    /// Slots for routed experts.
    pub fn n_slots(&self) -> u32 {
        self.n_slots
    }

    /// Destinations of an expert's parts in a slot.
    pub fn parts(&self, expert: u32, slot: u32) -> Vec<ExpertPart> {
        let [dim, ffn_dim] = self.dims;
        let mut parts = self.parts_in(&self.matrices, expert, slot);
        let biases = self.biases.iter().zip(&self.bias_members).zip([2 * ffn_dim, dim]);
        for ((tensor, members), of_each) in biases {
            let Some(tensor) = tensor else { continue };
            parts.extend(members.iter().map(|(name, places)| ExpertPart {
                name: name.clone(),
                share: Some([expert, self.n_experts]),
                place: TensorSlot::Values {
                    tensor: tensor.clone(),
                    places: RowPlaces::from(slot * of_each + places.first),
                },
            }));
        }
        parts
    }

    /// Destinations of an expert's parts among those of all experts.
    pub fn parts_of_all(&self, expert: u32) -> Vec<ExpertPart> {
        self.parts_in(&self.all, expert, expert)
    }

    fn parts_in(&self, matrices: &Matrices, expert: u32, place: u32) -> Vec<ExpertPart> {
        let [dim, ffn_dim] = self.dims;
        let (tensors, share) = match &self.tensors[..] {
            [all] => (Some(all), Some([expert, self.n_experts])),
            each => (each.get(expert as usize), None),
        };
        let to = |matrix: &Matrix, (name, places)| ExpertPart {
            name,
            share,
            place: TensorSlot::Rows { matrix: matrix.clone(), places },
        };
        let mut parts = Vec::new();
        if let Some(tensors) = tensors {
            for up in matrices.up.iter().filter(|up| up.part.first_expert == 0) {
                let of_each = up.part.rows;
                let members = tensors.up_members(up.rows, place * of_each, [of_each, ffn_dim]);
                parts.extend(members.into_iter().map(|member| to(&up.part.matrix, member)));
            }
            for down in matrices.down.iter().filter(|down| down.first_expert == 0) {
                parts.push(to(&down.matrix, tensors.down_member(place * dim, ffn_dim)));
            }
        }
        parts
    }

    /// Copies from the slots to the matrices of all experts: of the given experts and slots, and of the shared
    /// experts.
    pub fn copies(&self, there: impl Iterator<Item = (u32, u32)>) -> Vec<WordCopy> {
        let n_shared = self.n_shared;
        let shared = (0..n_shared).map(|i| (self.n_experts + i, self.n_slots + i));
        let there: Vec<(u32, u32)> = there.chain(shared).collect();
        let mut copies = Vec::new();
        for (kept, all) in self.matrices.parts().zip(self.all.parts()) {
            for (expert, slot) in &there {
                let row = |part: &ExpertMatrix, place: u32| Some(place.checked_sub(part.first_expert)? * part.rows);
                // A part only has the experts of its types.
                let from = row(kept, *slot).and_then(|row| kept.matrix.words_of(row, kept.rows));
                let to = row(all, *expert).and_then(|row| all.matrix.words_of(row, all.rows));
                let (Some((from, words)), Some((to, places))) = (from, to) else { continue };
                copies.extend(words.into_iter().zip(places).filter(|((_, n), _)| *n > 0).map(
                    |((from_first, n_words), (to_first, _))| WordCopy {
                        from: (from.clone(), from_first),
                        to: (to.clone(), to_first),
                        n_words,
                    },
                ));
            }
        }
        copies
    }

    /// Destinations of the shared experts.
    pub fn shared(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        self.matrices.parts().flat_map(|part| {
            let is_shared = |place: &TensorSlot| match place {
                TensorSlot::Rows { places, .. } => part.first_expert + places.first / part.rows >= self.n_slots,
                TensorSlot::Values { .. } => false,
            };
            part.tensor_slots().filter(move |(_, place)| is_shared(place))
        })
    }
}
