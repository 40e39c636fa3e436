//! Rebuilds this crate when a migration is added. The library watches only the migrations of the last build.

fn main() {
    println!("cargo:rerun-if-changed=../../migrations");
}
