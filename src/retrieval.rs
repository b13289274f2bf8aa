//! Retrieval: finding, among many items on a device, those that suit a query best.

pub mod index;
pub mod mol;
