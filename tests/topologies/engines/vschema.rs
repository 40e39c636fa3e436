//! Compares the files under ops/vitess with the tables of the schema.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

#[test]
fn every_table_is_in_one_keyspace_and_what_is_sharded_has_its_target_in_its_key() {
    let steps = ["0001_likes", "0002_consumer", "0003_jobs", "0004_boards", "0005_control", "0006_maps"];
    let sql: String = steps.iter().map(|step| read(&format!("migrations/{step}.sql"))).collect();
    let tables: Vec<&str> = sql.split("CREATE TABLE IF NOT EXISTS ").skip(1).collect();
    let mut named: BTreeSet<String> = tables.iter().map(|table| table.split(' ').next().unwrap().to_owned()).collect();
    named.insert("_sqlx_migrations".to_owned());
    let keyspace = |name: &str| serde_json::from_str::<Value>(&read(&format!("ops/vitess/{name}.json"))).unwrap();
    let names = |value: &Value| value["tables"].as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    let (sharded, rest) = (keyspace("vschema"), keyspace("vschema-unsharded"));
    assert!(names(&sharded).is_disjoint(&names(&rest)));
    assert_eq!(&names(&sharded) | &names(&rest), named);
    for name in names(&sharded) {
        let table = tables.iter().find(|table| table.starts_with(&format!("{name} "))).unwrap();
        let key = table.split("PRIMARY KEY (").nth(1).unwrap().split(')').next().unwrap();
        assert!(key.contains("target_id"), "{name}: {key}");
        assert_eq!(sharded["tables"][&name]["column_vindexes"][0]["column"], "target_id");
    }
}
