//! Retrieval: what is found, exactly, and what is refused.

#[path = "retrieval/index.rs"]
mod index;
#[path = "retrieval/mol.rs"]
mod mol;
