// What is used of the npm package papaparse, which reads CSV.
declare module "papaparse" {
  const Papa: {
    /** Finds out what stands between fields; a record that breaks the format is in `errors`, and is read as well as it can be. */
    parse(text: string, options: { skipEmptyLines: "greedy" }): { data: string[][]; errors: { code: string; row?: number }[] };
  };
  export default Papa;
}
