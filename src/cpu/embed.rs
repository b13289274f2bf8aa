use super::Call;
pub(crate) fn embed(_: Call<'_>) { todo!() }
pub(crate) fn last_row(_: Call<'_>) { todo!() }
