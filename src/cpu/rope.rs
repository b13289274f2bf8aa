use super::Call;
pub(crate) fn rope(_: Call<'_>) { todo!() }
pub(crate) fn rope_kv(_: Call<'_>) { todo!() }
