use super::Call;
pub(crate) fn top_k(_: Call<'_>) { todo!() }
