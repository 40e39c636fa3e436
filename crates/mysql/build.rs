//! Rebuilds when a migration is added: the library watches only the files that it knows.

fn main() {
    println!("cargo:rerun-if-changed=../../migrations");
}
