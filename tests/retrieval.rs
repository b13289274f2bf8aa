//! Retrieval: exact results and refused inputs.

#[path = "retrieval/documents.rs"]
mod documents;
#[path = "retrieval/index.rs"]
mod index;
#[path = "retrieval/mol.rs"]
mod mol;
