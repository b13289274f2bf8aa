use super::Call;
pub(crate) fn attention(_: Call<'_>) { todo!() }
