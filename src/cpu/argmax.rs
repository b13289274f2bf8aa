use super::Call;
pub(crate) fn argmax(_: Call<'_>) { todo!() }
pub(crate) fn argmax_merge(_: Call<'_>) { todo!() }
