//! Rebuilds this crate when a migration is added. This is necessary because the library watches only the migrations
//! that existed at the last build.

fn main() {
    println!("cargo:rerun-if-changed=../../migrations");
}
