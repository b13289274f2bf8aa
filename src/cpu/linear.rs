use super::Call;
pub(crate) fn matmul(_: Call<'_>) { todo!() }
pub(crate) fn matvec(_: Call<'_>) { todo!() }
