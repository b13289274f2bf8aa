use super::Call;
pub(crate) fn advance(_: Call<'_>) { todo!() }
pub(crate) fn penalize(_: Call<'_>) { todo!() }
pub(crate) fn sample(_: Call<'_>) { todo!() }
