//! Retrieval: finding, among many vectors on a device, those that suit a query best.

pub mod index;
