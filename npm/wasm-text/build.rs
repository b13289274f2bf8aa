//! Room for reading schemas whose references follow each other: 1 MiB, as usual, is enough for 200.

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-zstack-size=4194304");
    println!("cargo::rerun-if-changed=build.rs");
}
