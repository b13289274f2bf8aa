//! Tensors: a shape, an element type, and memory that may not be allocated yet.
//!
//! A tensor is *declared* first and *allocated* later, so that a [`MemoryPlan`](crate::MemoryPlan) can be computed
//! before any allocation, and a recording's temporaries can share memory.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::dtype::DType;
use crate::error::Error;
use crate::platform::{AnyAttached, Attachable};

/// Purpose of memory; the memory plan has a sum per role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Model weights and tables.
    Weights,
    /// Cached keys and values.
    Cache,
    /// Intermediate results of a pass.
    Activations,
}

/// An executor's private data, attached once to a block or a recording.
#[derive(Default)]
pub(crate) struct Attached(OnceLock<Box<AnyAttached>>);

impl Attached {
    /// Whether nothing is attached yet.
    pub fn is_empty(&self) -> bool {
        self.0.get().is_none()
    }

    /// Attaches a value, unless another thread has attached an equivalent one.
    pub fn attach<T: Attachable>(&self, value: T) {
        let _ = self.0.set(Box::new(value));
    }

    /// The attached value, if it is a `T`.
    pub fn get<T: Attachable>(&self) -> Option<&T> {
        self.0.get().and_then(|value| value.downcast_ref())
    }
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_empty() { "nothing attached" } else { "attached" })
    }
}

/// Writes to tensors: implemented by devices, for modules that do not depend on them.
pub trait TensorWriter {
    /// Writes words from word `first` on, allocating the tensor if necessary. Later runs see them.
    ///
    /// # Errors
    /// [`Error::Operand`] if the words do not fit; errors of the device.
    fn write_words(&self, tensor: &Tensor, first: usize, words: &[u32]) -> Result<(), Error>;
}

/// A block of an executor's memory; several temporaries may use it at different times.
#[derive(Debug)]
pub(crate) struct MemoryBlock {
    pub size_bytes: u64,
    pub role: Role,
    pub memory: Attached,
}

impl MemoryBlock {
    pub fn new(size_bytes: u64, role: Role) -> Arc<Self> {
        Arc::new(MemoryBlock { size_bytes, role, memory: Attached::default() })
    }
}

/// Identity of a tensor's content.
#[derive(Debug)]
pub(crate) struct TensorStorage {
    pub label: String,
    pub size_bytes: u64,
    /// Role of the tensor's own block; `None` for a temporary, which a recording places.
    role: Option<Role>,
    block: OnceLock<Arc<MemoryBlock>>,
}

impl TensorStorage {
    /// The block in which the tensor was placed, else its own. `None` for a temporary without a place.
    pub fn block(&self) -> Option<&Arc<MemoryBlock>> {
        match self.role {
            Some(role) => Some(self.block.get_or_init(|| MemoryBlock::new(self.size_bytes, role))),
            None => self.block.get(),
        }
    }

    /// Places the tensor in a block, unless it has one.
    pub fn place(&self, block: &Arc<MemoryBlock>) {
        let _ = self.block.set(block.clone());
    }
}

/// A typed, shaped view of a whole storage. Clones share the content.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub(crate) storage: Arc<TensorStorage>,
    shape: Vec<u32>,
    dtype: DType,
}

/// Tensors are bound as arrays of up to 16-byte elements.
const ALIGNMENT: u64 = 16;

impl Tensor {
    /// Declares a tensor with its own memory. The size is rounded up to 16 bytes.
    ///
    /// # Errors
    /// [`Error::Operand`] if the shape is empty, has a zero, or exceeds 2^32 elements.
    pub fn declare(label: impl Into<String>, role: Role, shape: &[u32], dtype: DType) -> Result<Tensor, Error> {
        Tensor::with_role(label, Some(role), shape, dtype)
    }

    /// Declares a tensor that a recording will place.
    pub(crate) fn temporary(label: impl Into<String>, shape: &[u32], dtype: DType) -> Result<Tensor, Error> {
        Tensor::with_role(label, None, shape, dtype)
    }

    fn with_role(label: impl Into<String>, role: Option<Role>, shape: &[u32], dtype: DType) -> Result<Tensor, Error> {
        let len = shape
            .iter()
            .try_fold(1u64, |len, &d| len.checked_mul(u64::from(d)).filter(|&n| n > 0 && n <= 1 << 32))
            .filter(|_| !shape.is_empty());
        let Some(len) = len else {
            return Err(Error::Operand {
                kernel: "tensor",
                operand: "shape",
                expected: "one or more dimensions whose product is 1 to 2^32".into(),
                found: format!("{shape:?}"),
            });
        };
        let size_bytes = (len * dtype.size_bytes()).next_multiple_of(ALIGNMENT);
        let storage = TensorStorage { label: label.into(), size_bytes, role, block: OnceLock::new() };
        Ok(Tensor { storage: Arc::new(storage), shape: shape.to_vec(), dtype })
    }

    /// The label given at declaration.
    pub fn label(&self) -> &str {
        &self.storage.label
    }

    /// Dimensions, the last contiguous.
    pub fn shape(&self) -> &[u32] {
        &self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().map(|&d| d as usize).product()
    }

    /// Always false: shapes have no zeros.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size in bytes, a multiple of 16.
    pub fn size_bytes(&self) -> u64 {
        self.storage.size_bytes
    }

    /// The range of all words.
    pub(crate) fn all_words(&self) -> std::ops::Range<usize> {
        0..self.size_bytes() as usize / 4
    }

    /// The same elements with other dimensions, such as a one-row matrix as a vector.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of elements differs.
    pub fn reshape(&self, shape: &[u32]) -> Result<Tensor, Error> {
        let len = shape.iter().try_fold(1usize, |len, &d| len.checked_mul(d as usize));
        if len != Some(self.len()) {
            return Err(self.shape_error("reshape", "shape", shape));
        }
        Ok(Tensor { storage: self.storage.clone(), shape: shape.to_vec(), dtype: self.dtype })
    }

    /// The first elements with other dimensions, in the same memory.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are fewer elements.
    pub(crate) fn prefix(&self, shape: &[u32]) -> Result<Tensor, Error> {
        let len = shape.iter().try_fold(1usize, |len, &d| len.checked_mul(d as usize));
        if len.is_none_or(|len| len > self.len()) {
            return Err(self.shape_error("prefix", "shape", shape));
        }
        Ok(Tensor { storage: self.storage.clone(), shape: shape.to_vec(), dtype: self.dtype })
    }

    /// The first rows as a tensor in the same memory.
    ///
    /// # Errors
    /// [`Error::Operand`] if there are fewer rows.
    pub(crate) fn first_rows(&self, n_rows: u32) -> Result<Tensor, Error> {
        let mut shape = self.shape.clone();
        let found = shape.first().copied().unwrap_or(0);
        let block = self.storage.block().filter(|_| n_rows <= found);
        let Some(block) = block else {
            return Err(Error::Operand {
                kernel: "tensor",
                operand: "first_rows",
                expected: format!("at most {found}, of a placed tensor"),
                found: n_rows.to_string(),
            });
        };
        shape[0] = n_rows;
        let rows = Tensor::temporary(self.label(), &shape, self.dtype)?;
        rows.storage.place(block);
        Ok(rows)
    }

    /// The same memory as words, for kernels that know the element type otherwise.
    pub(crate) fn words(&self) -> Tensor {
        Tensor { dtype: DType::U32, ..self.clone() }
    }

    /// Whether both share their content, in any shape.
    pub(crate) fn is_same(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
    }

    /// Whether both share a block, as a tensor and its first rows do.
    pub(crate) fn is_in_place_of(&self, other: &Tensor) -> bool {
        let blocks = self.storage.block().zip(other.storage.block());
        blocks.is_some_and(|(block, other)| Arc::ptr_eq(block, other))
    }

    /// Whether the tensor was declared as part of a cache.
    pub(crate) fn is_cache(&self) -> bool {
        self.storage.role == Some(Role::Cache)
    }

    /// The dimensions of a matrix.
    pub(crate) fn dims2(&self, kernel: &'static str, operand: &'static str) -> Result<[u32; 2], Error> {
        match *self.shape {
            [rows, cols] => Ok([rows, cols]),
            _ => Err(Error::Operand {
                kernel,
                operand,
                expected: "a tensor of two dimensions".into(),
                found: format!("of shape {:?}", self.shape),
            }),
        }
    }

    /// Refuses any shape but `expected`.
    pub(crate) fn expect_shape(
        &self,
        kernel: &'static str,
        operand: &'static str,
        expected: &[u32],
    ) -> Result<(), Error> {
        if self.shape == expected { Ok(()) } else { Err(self.shape_error(kernel, operand, expected)) }
    }

    fn shape_error(&self, kernel: &'static str, operand: &'static str, expected: &[u32]) -> Error {
        Error::Shape { kernel, operand, expected: expected.to_vec(), found: self.shape.clone() }
    }

    /// This tensor's memory, attached by an executor with memory of type `M`.
    ///
    /// # Errors
    /// [`Error::Operand`] if the memory is not allocated, or belongs to another executor.
    pub(crate) fn memory<M: Attachable>(&self) -> Result<&M, Error> {
        let attached = self.storage.block().map(|block| &block.memory).filter(|memory| !memory.is_empty());
        attached.and_then(Attached::get).ok_or_else(|| Error::Operand {
            kernel: "tensor",
            operand: "storage",
            expected: "memory of this device".into(),
            found: match attached {
                None => format!("`{}`, which is not allocated", self.storage.label),
                Some(_) => format!("`{}` on another device", self.storage.label),
            },
        })
    }
}

/// A copy of words between tensors, each with its first word.
#[derive(Clone, Debug)]
pub(crate) struct WordCopy {
    pub from: (Tensor, usize),
    pub to: (Tensor, usize),
    pub n_words: usize,
}
