//! Retrieval: which items of many suit a query best.

pub mod mol;
