//! Rebuilds when a migration is added: the library only watches those that it knows.

fn main() {
    println!("cargo:rerun-if-changed=../../migrations");
}
