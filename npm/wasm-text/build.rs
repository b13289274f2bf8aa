//! Room for reading schemas whose references follow each other: of the usual 1 MiB, 100 take a part, and 500 more than all.

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-zstack-size=4194304");
    println!("cargo::rerun-if-changed=build.rs");
}
