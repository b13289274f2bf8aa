//! Retrieval: what is found, exactly, and what is refused.

mod common;

#[path = "retrieval/mol.rs"]
mod mol;
