# Adds up logs of test runs. Prints one line, `PASSED FAILED SKIPPED`:
#
#     awk -f scripts/count-tests.awk LOG..
#
# It reads what `cargo test -- --show-output`, wasm-bindgen-test-runner, `node --test --test-reporter=tap` and Python's
# unittest print, and lines `skipped step: ..` of scripts/test itself.
#
# Rust's harness knows no test that finds out while it runs that it cannot: such a test prints a line that begins with
# `skipped:` and returns, and the harness counts it as passed. Here it is counted as skipped, once, however often it says so.
# A test that goes without a part prints `left out:` and has passed.

FNR == 1 { passing = 0; name = ""; ran = "" }

# Output of tests is shown below the name of each, first that of tests that passed.
/^successes:$/ { passing = 1; name = "" }
/^failures:$/ { passing = 0; name = "" }
/^---- .* stdout ----$/ { name = $0 }
passing && name != "" && /^skipped:/ { skipped++; passed--; name = "" }

/^test result: / {
    passed += $4; failed += $6; skipped += $8
    passing = 0; name = ""
}

# node:test. A test that ran into its time limit, or whose file ended before it, is cancelled.
/^# pass [0-9]+$/ { passed += $3 }
/^# (fail|cancelled) [0-9]+$/ { failed += $3 }
/^# (skipped|todo) [0-9]+$/ { skipped += $3 }

# unittest: `Ran 9 tests in 0.1s`, then `OK (skipped=1)` or `FAILED (failures=1, errors=2, skipped=3)`.
/^Ran [0-9]+ tests? in / { ran = $2 }
/^(OK|FAILED)( \(.*\))?$/ && ran != "" {
    bad = number("failures") + number("errors") + number("unexpected successes")
    left = number("skipped")
    passed += ran - bad - left; failed += bad; skipped += left
    ran = ""
}

/^skipped step: / { skipped++ }

END { print passed + 0, failed + 0, skipped + 0 }

function number(what) {
    return match($0, what "=[0-9]+") ? substr($0, RSTART + length(what) + 1, RLENGTH - length(what) - 1) + 0 : 0
}
